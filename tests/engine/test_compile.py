"""`engine.compile=true` with torch's real compiler: once per model, the same bits on any number of instances."""

import time

import pytest

from podium.distributed.instances import Instances
from podium.engine import compile_cache
from podium.runs.folder import Run
from tests.support.crew import Crew
from tests.support.processes import podium_afresh
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow

#: embeddings, whose gradients compiled code adds up in any order unless told not to; dropout
COMPILED = ["batch.micro=4", "batch.replicas=4", "train.length=4up", "workload.model.layers=1", "engine.compile=true"]


def trained(folder, workload, *overrides, instances=1, env=None) -> dict:
    """From the start of Python on: what torch's compiler keeps may depend on what was loaded before."""
    name = f"run-{time.monotonic_ns()}"
    args = ["train", *TINY[workload], *COMPILED, *overrides, "--instances", instances, "--out", name]
    done = podium_afresh(folder, *args, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    summary = Run(folder / name).summary()
    made = summary["executable"]
    assert f"{made['state']} in {made['seconds']:.1f} s" in done.stderr
    assert summary["seconds"]["compile"] == pytest.approx(made["seconds"], abs=1e-3)
    return summary


def test_one_instance_compiles_and_all_others_and_later_runs_load(tmp_path):
    env = {"PODIUM_CACHE": str(tmp_path / "cache")}
    traps = {1: ["precision.trap=true"]}  # which looks at compiled code from outside
    runs = [trained(tmp_path, "gpt2", *traps.get(count, ()), instances=count, env=env) for count in (2, 1)]
    assert [run["executable"]["state"] for run in runs] == ["compiled", "loaded"]
    assert len({run["weights_sha256"] for run in runs}) == 1
    assert len({run["executable"]["cache"] for run in runs}) == 1
    (log,) = [path.read_text() for path in tmp_path.glob("run-*/log/instance-1.log")]
    assert "loaded in" in log


def test_two_threads_give_the_same_bits_at_every_run(tmp_path):
    overrides = ["engine.threads=2", "batch.replicas=1", "batch.micro=32", "workload.data.samples=160"]
    runs = [trained(tmp_path, "bert", *overrides) for _ in range(2)]
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
        compile_cache.first_of_hosts(instances, work, work)
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    return spans


@pytest.fixture(scope="module")
def crew():
    crew = Crew(4, __name__)
    yield crew
    crew.close()


def test_others_wait_for_the_first_of_their_host_longer_than_any_message_may_take(crew):
    crew.join(4, timeout_s=2, num_per_host=2)
    spans = crew.run(in_turn, 4.0, False)
    first = max(spans[0][1], spans[2][1])
    assert spans[1][0] >= spans[0][1]
    assert spans[3][0] >= first


def test_others_are_told_where_the_first_cannot_compile(crew):
    crew.join(2, num_per_host=2)
    own, other = crew.run(in_turn, 0.1, True)
    assert own == ["cannot be compiled"]
    assert other == ["instance 0 is lost: it could not compile the model"]
