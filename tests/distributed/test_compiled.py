"""`engine.compile=true` with torch's real compiler: once per model, the same bits on any number of instances."""

import time

import pytest

from podium.engine import executables
from podium.engine.instances import Instances
from podium.run import Run
from tests.conftest import TINY
from tests.distributed.crew import Crew

pytestmark = pytest.mark.slow

#: embeddings, whose gradients compiled code adds up in any order unless told not to; dropout
COMPILED = ["batch.micro=4", "batch.replicas=4", "train.length=4up", "workload.model.layers=1", "engine.compile=true"]


def trained(podium, folder, workload, *overrides, instances=1, env=None) -> dict:
    name = f"run-{time.monotonic_ns()}"
    done = podium("train", *TINY[workload], *COMPILED, *overrides, "--instances", instances, "--out", name,
                  timeout=400, env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = Run(folder / name).summary()
    made = summary["executable"]
    assert f"{made['state']} in {made['seconds']:.1f} s" in done.stderr
    assert summary["seconds"]["compile"] == pytest.approx(made["seconds"], abs=1e-3)
    return summary


def test_one_instance_compiles_and_all_others_and_later_runs_load(podium, tmp_path):
    env = {"PODIUM_CACHE": str(tmp_path / "cache")}
    runs = [trained(podium, tmp_path, "gpt2", instances=count, env=env) for count in (2, 1, 4)]
    assert [run["executable"]["state"] for run in runs] == ["compiled", "loaded", "loaded"]
    assert len({run["weights_sha256"] for run in runs}) == 1
    assert len({run["executable"]["cache"] for run in runs}) == 1
    logs = [path.read_text() for path in tmp_path.glob("run-*/log/instance-[123].log")]
    assert len(logs) == 4
    assert all("loaded in" in log for log in logs)


def test_two_threads_give_the_same_bits_at_every_run(podium, tmp_path):
    overrides = ["engine.threads=2", "batch.replicas=1", "batch.micro=32", "workload.data.samples=160"]
    runs = [trained(podium, tmp_path, "bert", *overrides) for _ in range(3)]
    assert len({run["weights_sha256"] for run in runs}) == 1


def in_turn(instances: Instances, seconds: float, fails: bool) -> list[float]:
    """When each began, and ended, what it does in its turn."""

    def work() -> bool:
        began = time.monotonic()
        time.sleep(seconds)  # stands for a compilation
        if fails:
            raise ValueError("cannot be compiled")
        spans.extend([began, time.monotonic()])
        return True

    spans: list[float] = []
    try:
        executables._first_of_hosts(instances, work, work)
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    return spans


@pytest.fixture(scope="module")
def crew():
    crew = Crew(4, __name__)
    yield crew
    crew.close()


def test_others_wait_for_the_first_of_their_host_longer_than_any_message_may_take(crew):
    crew.join(4, timeout_s=2, num_mates=2)
    spans = crew.run(in_turn, 4.0, False)
    first = max(spans[0][1], spans[2][1])
    assert spans[1][0] >= spans[0][1]
    assert spans[3][0] >= first


def test_others_are_told_where_the_first_cannot_compile(crew):
    crew.join(2, num_mates=2)
    own, other = crew.run(in_turn, 0.1, True)
    assert own == ["cannot be compiled"]
    assert other == ["instance 0 is lost: it could not compile the model"]
