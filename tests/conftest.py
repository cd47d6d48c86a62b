"""What every test shares: a cache of its own, small recipes, and `podium` as a real process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: a few updates of each workload on generated data: dropout and batch norm included
TINY = {
    "bert": [
        "bert/quick",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "workload.data.length=32",
        "workload.model.layers=2",
        "workload.model.hidden=32",
        "workload.model.vocabulary=200",
        "workload.model.dropout=0.1",
        "workload.model.attention_dropout=0.1",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=6",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "cnn": [
        "cnn/quick",
        "workload.data.source=generated",
        "workload.data.image_size=16",
        "workload.data.samples=160",
        "workload.data.test_samples=64",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=48",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "cosmology": [
        "cosmology/quick",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "workload.data.valid_samples=14",
        "workload.model.width=2",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=6",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "gpt2": [
        "gpt2/quick",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "workload.data.test_samples=40",
        "workload.data.sample.tokens=20",
        "workload.model.layers=2",
        "workload.model.hidden=16",
        "workload.model.heads=2",
        "workload.model.context=12",
        "workload.model.vocabulary=50",
        "workload.model.dropout=0.1",
        "batch.micro=8",
        "train.length=2ep",
        "valid.every=1ep",
        "valid.micro=12",
        "valid.max_samples=null",
        "checkpoint.every=1ep",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "mnist": [
        "mnist",
        "workload.data.source=generated",
        "workload.data.generated_train=256",
        "workload.data.generated_test=64",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=48",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "neuron": [
        "neuron",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=12",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tests never read or fill the user's cache."""
    os.environ["PODIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


#: the largest of them are for the whole suite only
_SLOW = ("bert", "cnn", "cosmology", "gpt2")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in sorted(TINY)])
def tiny(request) -> list[str]:
    """Recipe name and overrides of a tiny training, for every workload."""
    return list(TINY[request.param])


@pytest.fixture
def podium(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `podium ARGS` in a process of its own, in `tmp_path`."""

    def run(*args: object, timeout: float = 120, env: dict | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            podium_command(*args),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "COLUMNS": "200", **(env or {})},
        )

    return run


def podium_command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from podium.cli import main; main()", *map(str, args)]


def assert_user_error(done: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit 2, one sentence with these parts in it, no traceback."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    for part in parts:
        assert part in line, line


def run_files(folder: Path) -> list[str]:
    """Everything below a folder, to see that nothing half-written stays."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that threads wait for each other more than they work, above all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
