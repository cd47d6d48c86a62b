"""Replicas cut into stages, on real processes: the same bits as in one piece, whatever the schedule."""

import json
import signal

import pytest
import torch

from podium.checkpoints import reading
from podium.runs.folder import Run
from tests.support.outcomes import outcome
from tests.support.processes import started
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow

#: dropout in every block, clipping over all stages, accumulation, a schedule that looks at the validation loss
SPREAD = ["batch.micro=2", "batch.accumulation=4", "batch.replicas=2", "optim.clip_norm=0.5", "train.length=20up",
          "valid.every=10up", "valid.max_samples=21", "schedule.warmup=0"]  # fmt: skip
OWN = {
    "bert": ["workload.data.samples=400", "workload.model.layers=3", "workload.data.packed=true"],
    "cnn": ["workload.data.samples=400", "precision=16.32", "average.method=exponential", "average.every=2up"],
    "cosmology": ["workload.data.samples=80", "train.length=5up", "valid.every=5up"],
    "gpt2": ["workload.data.samples=400", "workload.model.layers=3", "workload.model.dropout=0.1"],
    "mnist": ["workload.data.generated_train=400"],
    "neuron": ["workload.data.samples=400", "parallel.recompute=true"],
}


def recipe(workload: str, *extra: str) -> list[str]:
    return [*TINY[workload], *SPREAD, *OWN[workload], *extra]


@pytest.mark.parametrize(
    ("workload", "tied", "stages", "schedule", "num_instances"),
    [
        ("bert", "true", "2", "interleaved", 4),
        ("bert", "false", "[0,1,1,1]", "grouped", 4),
        ("gpt2", "true", "[0,1,1,1]", "interleaved", 4),
        ("gpt2", "false", "2", "grouped", 4),
    ],
)
def test_stages_give_the_bits_of_the_whole(
    workload, tied, stages, schedule, num_instances, podium, tmp_path, outcome_alone
):
    extra = f"workload.model.tied={tied}"
    cut = (f"parallel.stages={stages}", f"parallel.schedule={schedule}")
    done = podium("train", *recipe(workload, extra), *cut, "--instances", num_instances, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert outcome(run) == outcome_alone(recipe(workload, extra))
    num_stages = 2 if stages == "2" else 4
    assert run.summary()["topology"] == {"hosts": 1, "instances": num_instances, "replicas": 2, "stages": num_stages}
    embedding, head = ("Embedding", "Classifier") if workload == "bert" else ("embedding", "head")
    assert f"{embedding} → device 0\n" in done.stderr
    assert f"{head} → device 0\n" in done.stderr
    assert f"→ device {num_stages - 1}\n" in done.stderr
    (newest, *_) = reversed(reading.checkpoint_paths(run.checkpoints))
    assert (newest / f"model-{num_stages}-of-{num_stages}.safetensors").exists()


def test_pipelines_may_carry_different_numbers_of_replicas(podium, tmp_path, outcome_alone):
    three = recipe("gpt2", "batch.replicas=3")
    done = podium("train", *three, "parallel.stages=2", "--instances", 4, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(three)


@pytest.mark.parametrize(
    ("workload", "stages", "schedule"),
    [
        ("cnn", "3", "interleaved"),
        ("cosmology", "[3,4,3]", "interleaved"),
        ("mnist", "4", "sequential"),
        ("neuron", "2", "interleaved"),
    ],
)
def test_any_workload_can_be_cut(workload, stages, schedule, podium, tmp_path, outcome_alone):
    """Batch norm, convolutions, tensors that skip stages, half precision, recomputation; both replicas on one line of
    instances."""
    cut = (f"parallel.stages={stages}", f"parallel.schedule={schedule}")
    done = podium("train", *recipe(workload), *cut, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(recipe(workload))


def test_a_stopped_run_goes_on_with_other_stages_and_with_none(podium, tmp_path, outcome_alone):
    """Two stages, then three, then none; each stage holds and writes its own part only."""
    args = [*recipe("gpt2"), "parallel.stages=2", "checkpoint.every=1up", "checkpoint.best=false", "--out", "run"]
    folder = tmp_path / "run" / "checkpoints"
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until(lambda: reading.checkpoint_paths(folder), "a checkpoint")
        assert launched.ended(signal.SIGTERM).returncode == 75, launched.stderr
    first = reading.checkpoint_paths(folder)[-1]
    shards = [set(json.loads((first / "manifest.json").read_text())["files"])]
    assert shards == [{"model-1-of-2.safetensors", "model-2-of-2.safetensors", "optimiser-1-of-2.safetensors",
                       "optimiser-2-of-2.safetensors", "state.json"}]  # fmt: skip
    names = [set(reading.tensors_in(reading.read_checked(first / f"model-{number}-of-2.safetensors")[0]))
             for number in (1, 2)]  # fmt: skip
    assert not names[0] & names[1]

    limited = podium("resume", "run", "parallel.stages=3", "--instances", 6, timeout=200)
    assert limited.returncode == 0, limited.stderr
    assert "block 2 → device 2" in limited.stderr
    weights, _, optimiser, valid = outcome(Run(tmp_path / "run"))
    assert (weights, optimiser, valid) == tuple(outcome_alone(recipe("gpt2"))[place] for place in (0, 2, 3))
    done = podium("validate", "run")
    assert done.returncode == 0, done.stderr
    earlier, _ = reading.checkpoint_paths(folder)
    back = podium("resume", "run", "parallel.stages=1", "--checkpoint", earlier.name.removeprefix("update-"))
    assert back.returncode == 0, back.stderr
    assert Run(tmp_path / "run").summary()["topology"]["stages"] == 1
    assert outcome(Run(tmp_path / "run"))[0] == weights
    refused = podium("resume", "run", "optim.lr=1")
    assert refused.returncode == 2
    assert "optim.lr cannot change when a run continues" in refused.stderr


def test_a_lost_stage_is_started_anew(tmp_path, outcome_alone):
    args = [*recipe("gpt2"), "parallel.stages=2", "checkpoint.every=1up", "launch.timeout=20", "--out", "run"]
    folder = tmp_path / "run" / "checkpoints"
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until(lambda: len(reading.checkpoint_paths(folder)) == 2, "two checkpoints")
        launched.instances[1].kill()
        assert launched.ended().returncode == 0, launched.stderr
    assert "restarting from the last checkpoint" in launched.stderr
    assert outcome(Run(tmp_path / "run"))[0] == outcome_alone(recipe("gpt2"))[0]


def test_each_stage_holds_only_its_own(podium, tmp_path):
    done = podium("train", *recipe("bert"), "parallel.stages=[0,1,2]", "train.length=2up", "--out", "run")
    assert done.returncode == 0, done.stderr
    (newest, *_) = reversed(reading.checkpoint_paths(tmp_path / "run" / "checkpoints"))
    for stage, blocks in enumerate(
        [("embedding", "pooler", "classifier"), ("encoders.0",), ("encoders.1", "encoders.2")]
    ):
        for kind in ("model", "optimiser"):
            path = newest / f"{kind}-{stage + 1}-of-3.safetensors"
            names = [name.partition("/")[2] if kind == "optimiser" else name
                     for name in reading.tensors_in(reading.read_checked(path)[0])]  # fmt: skip
            assert names
            assert all(name.startswith(blocks) for name in names if name), names
    whole = reading.load(newest)
    assert all(isinstance(tensor, torch.Tensor) for tensor in whole.weights.values())
