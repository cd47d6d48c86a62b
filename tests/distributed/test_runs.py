"""The first promise, on real processes: the same weights, optimiser state and losses on any number of instances."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from podium.runs.folder import Run
from tests.support.outcomes import outcome
from tests.support.processes import assert_user_error, podium_command
from tests.support.recipes import TINY, eight

pytestmark = pytest.mark.slow

#: instances of 8 replicas: blocks of equal and of different sizes, of one subtree and of several; the statistics of
#: cnn, which two replicas share, cannot lie in three
COUNTS = dict.fromkeys(TINY, (2, 3, 5, 6, 7, 8)) | {"mnist": (2, 3, 4, 5, 6, 7, 8), "cnn": (2, 5, 6, 7, 8)}


@pytest.mark.parametrize(
    ("workload", "num_instances"),
    [(name, count) for name in sorted(TINY) for count in COUNTS[name]],
)
def test_any_number_of_instances_gives_the_same_bits(workload, num_instances, podium, tmp_path, outcome_alone):
    done = podium("train", *eight(workload), "--instances", num_instances, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert outcome(run) == outcome_alone(eight(workload))
    assert run.summary()["topology"]["instances"] == num_instances
    assert f"instance {num_instances - 1}" in done.stderr  # the topology is drawn once
    assert done.stderr.count("Topology") == 1
    logs = sorted(path.name for path in run.log.iterdir())
    assert logs == [f"instance-{index}.log" for index in range(num_instances)]


def test_replicas_that_share_no_statistics_may_lie_anywhere(podium, tmp_path, outcome_alone):
    assert_user_error(
        podium("train", *eight("cnn"), "--instances", 3, "--out", "run"),
        "norm.span = 2 cannot lie in 3 instances of 8 replicas",
        "(possible: 1, 2, 4 to 8)",
    )
    recipe = [*eight("cnn"), "workload.model.norm.span=1"]
    done = podium("train", *recipe, "--instances", 3, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(recipe)


@pytest.mark.parametrize("count", [3, 6])
def test_shards_of_the_optimiser_may_lie_on_any_number(count, podium, tmp_path, outcome_alone):
    done = podium("train", *eight("mnist"), "parallel.shard=optimiser", "--instances", count, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(eight("mnist"))


def test_shards_of_the_weights_need_equally_many_replicas_everywhere(podium):
    words = ["parallel.shard=parameters", "engine.reduction=fast", "engine.layout=default"]
    assert_user_error(
        podium("train", *eight("mnist"), *words, "--instances", 3, "--out", "run"),
        "parallel.shard=parameters needs equally many replicas on all instances",
        "(possible: 1, 2, 4, 8)",
    )


def test_shards_give_the_same_bits_too(podium, tmp_path, outcome_alone):
    done = podium("train", *eight("mnist"), "batch.shuffle=shard", "--instances", 2, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone([*eight("mnist"), "batch.shuffle=shard"])
    assert outcome_alone([*eight("mnist"), "batch.shuffle=shard"]) != outcome_alone(eight("mnist"))


def test_fast_reduction_differs_in_bits_but_not_in_substance(podium, tmp_path, outcome_alone):
    done = podium("train", *eight("neuron"), "engine.reduction=fast", "--instances", 3, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    weights, losses, _, _ = outcome(Run(tmp_path / "run"))
    exact_weights, exact_losses, _, _ = outcome_alone(eight("neuron"))
    assert weights != exact_weights
    assert losses[-1]["train/loss"] == pytest.approx(exact_losses[-1]["train/loss"], rel=1e-2)


def test_a_stopped_run_resumes_on_another_number_of_instances(podium, tmp_path, outcome_alone):
    args = ["train", *eight("neuron"), "train.time_limit=0.01s", "--out", "run"]
    done = podium(*args, "--instances", 2)
    assert done.returncode == 75, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert "`podium resume run` continues" in line
    path = tmp_path / "run" / "recipe.yaml"
    path.write_text(path.read_text().replace("time_limit: 0.01", "time_limit: null"))
    done = podium("resume", "run", "--instances", 3, timeout=300)
    assert done.returncode == 0, done.stderr
    weights, losses, optimiser, valid = outcome(Run(tmp_path / "run"))
    assert (weights, losses, optimiser, valid) == outcome_alone(eight("neuron"))


def test_torchrun_and_slurm_are_understood(tmp_path, outcome_alone):
    """The same command, started by others: torch's own launcher, and processes that Slurm's variables describe."""
    command = ["train", *eight("mnist"), "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python",
                *podium_command(*command, tmp_path / "torchrun")]  # fmt: skip
    assert subprocess.run(torchrun, timeout=200, capture_output=True).returncode == 0
    assert outcome(Run(tmp_path / "torchrun")) == outcome_alone(eight("mnist"))

    def task(index: int) -> int:
        env = {"SLURM_PROCID": str(index), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(index), "SLURM_NNODES": "1",
               "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}  # fmt: skip
        process = subprocess.run(podium_command(*command, tmp_path / "slurm"), env={**os.environ, **env}, timeout=200)
        return process.returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(task, range(2))) == [0, 0]
    assert outcome(Run(tmp_path / "slurm")) == outcome_alone(eight("mnist"))


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--instances", "16"], ["16 instances", "possible: 1 to 8"]),
        (["--hosts", "a:3,b:5", "--instances", "7"], ["--instances 7 does not fit --hosts a:3,b:5"]),
        (["--instances", "many"], ["expected a number, a range such as 2..8, or auto"]),
        (["--hosts", "nowhere,elsewhere", "--instances", "2", "--join"], ["is not one of --hosts nowhere,elsewhere"]),
    ],
)
def test_counts_and_hosts_that_cannot_be_are_one_sentence(args, parts, podium, tmp_path):
    assert_user_error(podium("train", *eight("mnist"), *args, "--out", "run"), *parts)
    assert not (tmp_path / "run").exists()


def test_an_error_in_every_instance_is_told_once_and_leaves_nothing(podium, tmp_path):
    args = [*eight("mnist"), "workload.data.source=files", "workload.data.path=nowhere"]
    assert_user_error(podium("train", *args, "--instances", 2, "--out", "run"), "nowhere")
    assert not (tmp_path / "run").exists()


def test_topology_command_draws_without_starting_anything(podium):
    done = podium("topology", "neuron/gc4", "batch.replicas=16", "--hosts", "a,b", "--instances", 8)
    assert done.returncode == 0
    assert "2 hosts · 8 instances · 16 replicas" in done.stdout
    assert "replicas 14 to 15" in done.stdout
    done = podium("topology", "neuron/gc4", "batch.replicas=8", "--hosts", "a:1,b:3")
    assert "2 hosts · 4 instances · 8 replicas" in done.stdout


def test_resuming_under_other_conditions_warns_that_bits_may_differ(podium, tmp_path):
    done = podium("train", *eight("mnist"), "train.time_limit=0.01s", "--out", "run")
    assert done.returncode == 75
    file = tmp_path / "run" / "environment.json"
    file.write_text(file.read_text().replace(torch.__version__, "2.0.0"))
    done = podium("resume", "run")
    assert "bits may differ" in done.stderr
    assert f"torch 2.0.0 → {torch.__version__}" in done.stderr
