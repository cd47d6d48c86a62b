"""`parallel.shard` on real processes: the same bits and files as without it, kills and resumes included."""

import psutil
import pytest

from podium import checkpoint
from podium.run import Run
from tests.conftest import TINY
from tests.distributed.test_runs import eight, on_one, outcome  # noqa: F401 - a fixture
from tests.faults.test_lost_instances import instances_of, kill_all
from tests.processes import started

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_instances", [2, 4])
@pytest.mark.parametrize("workload", ["bert", "cnn", "gpt2"])
def test_shards_of_the_optimiser_give_the_same_bits(workload, num_instances, podium, tmp_path, on_one):  # noqa: F811
    """With lamb, with half precision rounded by chance and an average of the weights, with clipping."""
    done = podium("train", *eight(workload), "parallel.shard=optimiser", "--instances", num_instances, "--out", "run",
                  timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == on_one(workload)


def test_fast_reduction_takes_shards_too(podium, tmp_path):
    for name, shard in (("with", "optimiser"), ("without", "none")):
        done = podium("train", *eight("gpt2"), "engine.reduction=fast", f"parallel.shard={shard}", "--instances", 2,
                      "--out", name)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "with")) == outcome(Run(tmp_path / "without"))


def change(path, before: str, after: str) -> None:
    text = (path / "recipe.yaml").read_text()
    assert before in text
    (path / "recipe.yaml").write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"), [(("optimiser", 4), ("none", 1)), (("none", 2), ("optimiser", 4)), (("optimiser", 4),) * 2]
)
def test_a_stopped_run_resumes_with_and_without_shards(before, after, podium, tmp_path, on_one):  # noqa: F811
    (shard, count), (next_shard, next_count) = before, after
    args = ["train", *eight("gpt2"), "train.time_limit=0.01s", f"parallel.shard={shard}", "--out", "run"]
    done = podium(*args, "--instances", count)
    assert done.returncode == 75, done.stderr
    change(tmp_path / "run", "time_limit: 0.01", "time_limit: null")
    change(tmp_path / "run", f"shard: {shard}", f"shard: {next_shard}")
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints", pytest.fail).update < 8
    done = podium("resume", "run", "--instances", next_count, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == on_one("gpt2")


KILLED = [*TINY["mnist"], "workload.data.generated_train=2048", "batch.micro=2", "batch.replicas=4", "optim.name=adamw",
          "optim.momentum=null", "train.length=40up", "checkpoint.every=4up", "engine.updates_per_call=2"]  # fmt: skip


def test_a_killed_instance_and_a_killed_run_lose_nothing(podium, tmp_path):
    assert podium("train", *KILLED, "--out", "straight").returncode == 0
    shard = [*KILLED, "parallel.shard=optimiser", "--instances", 2, "--out", "run"]
    with started("train", *shard, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 4)
        instances_of(psutil.Process(launched.process.pid))[1].kill()
        launched.until_records(tmp_path / "run", 12)
        kill_all(launched.process)
    assert podium("resume", "run", "--instances", 4).returncode == 0
    assert outcome(Run(tmp_path / "run"))[::2] == outcome(Run(tmp_path / "straight"))[::2]


def test_another_optimisers_state_is_refused_by_all(podium, tmp_path):
    args = ["train", *eight("mnist"), "train.time_limit=0.01s", "parallel.shard=optimiser", "--out", "run"]
    assert podium(*args, "optim.name=adamw", "optim.momentum=null", "--instances", 2).returncode == 75
    change(tmp_path / "run", "name: adamw", "name: momentum")
    done = podium("resume", "run", "--instances", 2)
    assert done.returncode == 2, done.stderr
    assert "the saved optimiser state is not that of momentum for this model" in done.stderr
