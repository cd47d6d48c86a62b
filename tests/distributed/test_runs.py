"""The first promise, on real processes: the same weights, optimiser state and losses on any number of instances."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from podium import checkpoint
from podium.run import Run
from tests.conftest import TINY, assert_user_error, podium_command

pytestmark = pytest.mark.slow

#: dropout, batch norm (neuron), accumulation, 8 replicas, clipping, a schedule that looks at the validation loss
EIGHT = ["batch.micro=4", "batch.accumulation=2", "batch.replicas=8", "optim.clip_norm=0.5", "schedule.warmup=3up",
         "train.length=8up", "valid.every=4up"]  # fmt: skip
#: cnn: statistics shared by two replicas, images mixed, half precision rounded by chance, an average of the weights
#: gpt2: blocks computed again in backward, in half precision
#: bert: packed rows with masks drawn anew, lamb
OWN = {
    "bert": ["workload.data.samples=256", "workload.data.packed=true", "workload.data.redraw=pairs",
             "optim.name=lamb", "optim.bias_correction=false"],
    "cnn": ["workload.data.samples=256", "workload.model.norm.span=2", "workload.data.augment.mixup=0.2",
            "workload.data.augment.cutmix=1.0", "precision=16.16", "average.method=exponential", "average.every=2up"],
    "cosmology": ["workload.data.samples=256", "workload.model.lambda_rho=1e-3"],
    "gpt2": ["workload.data.samples=256", "parallel.recompute=true", "precision=16.32"],
    "mnist": ["workload.data.generated_train=512"],
    "neuron": ["workload.data.samples=256"],
}  # fmt: skip


def eight(workload: str) -> list[str]:
    return [*TINY[workload], *OWN[workload], *EIGHT]


def outcome(run: Run) -> tuple:
    """Everything that must not depend on the number of instances."""
    losses = [
        {key: value for key, value in record.items() if "loss" in key or key == "update"} for record in run.records()
    ]
    found = checkpoint.load_latest(run.checkpoints, pytest.fail)
    kept = {**found.optimiser, **{f"average/{name}": tensor for name, tensor in found.average.items()}}
    optimiser = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in kept.items()}
    return run.summary()["weights_sha256"], losses, optimiser, run.summary()["valid"]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """The outcome on one instance, by workload and extra overrides."""
    known = {}

    def get(workload, *extra):
        if (workload, extra) not in known:
            folder = tmp_path_factory.mktemp("one")
            done = subprocess.run(
                podium_command("train", *eight(workload), *extra, "--out", folder / "run"), timeout=120
            )
            assert done.returncode == 0
            known[workload, extra] = outcome(Run(folder / "run"))
        return known[workload, extra]

    return get


@pytest.mark.parametrize(
    ("workload", "num_instances"),
    [
        (name, count)
        for name in sorted(TINY)
        for count in (2, 4, 8)
        if count != 4 or name in ("cosmology", "mnist", "neuron")
    ],
)
def test_any_number_of_instances_gives_the_same_bits(workload, num_instances, podium, tmp_path, on_one):
    done = podium("train", *eight(workload), "--instances", num_instances, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert outcome(run) == on_one(workload)
    assert run.summary()["topology"]["instances"] == num_instances
    assert f"instance {num_instances - 1}" in done.stderr  # the topology is drawn once
    assert done.stderr.count("Topology") == 1
    logs = sorted(path.name for path in run.log.iterdir())
    assert logs == [f"instance-{index}.log" for index in range(num_instances)]


def test_shards_give_the_same_bits_too(podium, tmp_path, on_one):
    done = podium("train", *eight("mnist"), "batch.shuffle=shard", "--instances", 2, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == on_one("mnist", "batch.shuffle=shard")
    assert on_one("mnist", "batch.shuffle=shard") != on_one("mnist")


def test_fast_reduction_differs_in_bits_but_not_in_substance(podium, tmp_path, on_one):
    done = podium("train", *eight("neuron"), "engine.reduction=fast", "--instances", 4, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    weights, losses, _, _ = outcome(Run(tmp_path / "run"))
    exact_weights, exact_losses, _, _ = on_one("neuron")
    assert weights != exact_weights
    assert losses[-1]["train/loss"] == pytest.approx(exact_losses[-1]["train/loss"], rel=1e-2)


def test_a_stopped_run_resumes_on_another_number_of_instances(podium, tmp_path, on_one):
    args = ["train", *eight("neuron"), "train.time_limit=0.01s", "--out", "run"]
    done = podium(*args, "--instances", 2)
    assert done.returncode == 75, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert "`podium resume run` continues" in line
    path = tmp_path / "run" / "recipe.yaml"
    path.write_text(path.read_text().replace("time_limit: 0.01", "time_limit: null"))
    done = podium("resume", "run", "--instances", 4, timeout=300)
    assert done.returncode == 0, done.stderr
    weights, losses, optimiser, valid = outcome(Run(tmp_path / "run"))
    assert (weights, losses, optimiser, valid) == on_one("neuron")


def test_torchrun_and_slurm_are_understood(tmp_path, on_one):
    """The same command, started by others: torch's own launcher, and processes that Slurm's variables describe."""
    command = ["train", *eight("mnist"), "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python",
                *podium_command(*command, tmp_path / "torchrun")]  # fmt: skip
    assert subprocess.run(torchrun, timeout=200, capture_output=True).returncode == 0
    assert outcome(Run(tmp_path / "torchrun")) == on_one("mnist")

    def task(index: int) -> int:
        env = {"SLURM_PROCID": str(index), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(index), "SLURM_NNODES": "1",
               "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}  # fmt: skip
        process = subprocess.run(podium_command(*command, tmp_path / "slurm"), env={**os.environ, **env}, timeout=200)
        return process.returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(task, range(2))) == [0, 0]
    assert outcome(Run(tmp_path / "slurm")) == on_one("mnist")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--instances", "16"], ["16 instances", "can be: 1, 2, 4, 8"]),
        (["--instances", "3"], ["power of two"]),
        (["--instances", "many"], ["expected a number or auto"]),
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
    assert "replica 14 … 15" in done.stdout


def test_resuming_under_other_conditions_warns_that_bits_may_differ(podium, tmp_path):
    done = podium("train", *eight("mnist"), "train.time_limit=0.01s", "--out", "run")
    assert done.returncode == 75
    file = tmp_path / "run" / "environment.json"
    file.write_text(file.read_text().replace(torch.__version__, "2.0.0"))
    done = podium("resume", "run")
    assert "bits may differ" in done.stderr
    assert f"torch 2.0.0 → {torch.__version__}" in done.stderr
