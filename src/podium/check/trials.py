"""Short trainings of a recipe through the real command: on several numbers of instances, killed, cut into stages."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from podium.checkpoints.reading import checkpoint_paths, load
from podium.errors import Interrupted, PodiumError
from podium.recipe.loading import Recipe
from podium.runs.folder import Run

_POLL_S = 0.02
#: what simplifies a schedule that does not fit few updates
SIMPLER = ["schedule.name=constant", "schedule.warmup=2up"]


@contextmanager
def trial_folder(keep: Path | None, purpose: str) -> Iterator[Path]:
    """Make the folder of the trials of a command: `keep`, which stays, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f"podium-{purpose}-") as folder:
        yield Path(folder).resolve()


def quick_overrides(recipe: Recipe, num_updates: int, every: int = 1) -> list[str]:
    """Return what makes a recipe short, with a checkpoint `every` few updates, and nothing but the run folder."""
    return [
        f"train.length={num_updates}up",
        "train.time_limit=null",
        "valid.every=0up",
        f"valid.max_samples={4 * recipe.valid.micro}",
        f"checkpoint.every={every}up",
        f"checkpoint.keep={-(-num_updates // every)}",
        "checkpoint.best=false",
        "log.report=false",
        "log.tensorboard=false",
        "log.wandb=off",
        "log.mlflow=off",
        "log.trackio=off",
        "log.observers=[]",
        "engine.updates_per_call=1",
        "engine.tune=off",
    ]


@dataclass(frozen=True)
class Trial:
    """How a short training ended: the digest of its weights, or why there is none."""

    run: Run
    sha256: str = ""
    problem: str = ""
    #: the exit code of the command
    code: int = 0


class Trials:
    """Trainings of one recipe for a few updates, each in a folder of its own below `folder`."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str], until: int | None = None) -> None:
        """`until`: the update to stop after, where the recipe goes on."""
        self._folder, self._name, self._overrides = folder, name, list(overrides)
        self._until = [] if until is None else ["--until", f"{until}up"]
        self._num = 0

    def train(self, num_instances: int, *more: str) -> Trial:
        """Train to the end."""
        run = self._next_run()
        return self._ended(run, self._start(self._train_words(run, num_instances, more)))

    def train_killed(self, num_instances: int, resumed_on: int, update: int) -> Trial:
        """Train until the checkpoint of `update` exists, kill every process, and resume from it."""
        run = self._next_run()
        process = self._start(self._train_words(run, num_instances, ()))
        saved = run.checkpoints / f"update-{update:08d}"
        while not saved.is_dir() and process.poll() is None:
            time.sleep(_POLL_S)
        _kill_with_children(process)
        if not saved.is_dir():
            return self._ended(run, process)
        # The processes may have come further before they were killed, or to the end: what is after `update` is lost.
        words = ["resume", str(run.path), "--checkpoint", str(update), "--instances", str(resumed_on)]
        return self._ended(run, self._start(words))

    def train_resumed(self, trained: Trial, resumed_on: int, update: int) -> Trial:
        """Resume a copy of a training from the checkpoint of `update`, on another number of instances."""
        run = self._next_run()
        shutil.copytree(trained.run.path, run.path)
        words = ["resume", str(run.path), "--checkpoint", str(update), "--instances", str(resumed_on), *self._until]
        return self._ended(run, self._start(words))

    def _next_run(self) -> Run:
        self._num += 1
        return Run(self._folder / f"trial-{self._num}")

    def _train_words(self, run: Run, num_instances: int, more: Sequence[str]) -> list[str]:
        words = ["train", self._name, *self._overrides, *more, "--out", str(run.path)]
        return [*words, "--instances", str(num_instances), *self._until]

    def _start(self, words: Sequence[str]) -> subprocess.Popen:
        with (self._folder / f"trial-{self._num}.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "podium", *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def _ended(self, run: Run, process: subprocess.Popen) -> Trial:
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        if code == 0 or (code == Interrupted.exit_code and self._until):
            return Trial(run, run.summary()["weights_sha256"])
        said = (self._folder / f"trial-{self._num}.txt").read_text(encoding="utf-8", errors="replace")
        own = [line.removeprefix("podium: ") for line in said.splitlines() if line.startswith("podium: ")]
        problem = own[-1] if own else f"ended with exit code {code}: {said[-300:].strip()}"
        return Trial(run, problem=problem, code=code)


def first_differing_update(one: Run, other: Run) -> str:
    """Return the first update whose checkpoints differ, and the first tensor of it, as a phrase; or nothing."""
    theirs = {path.name: path for path in checkpoint_paths(other.checkpoints)}
    for path in checkpoint_paths(one.checkpoints):
        if path.name not in theirs:
            continue
        try:
            mine, matching = load(path), load(theirs[path.name])
        except PodiumError:
            continue
        for name, tensor in sorted(mine.weights.items()):
            if name not in matching.weights or not bits_equal(tensor, matching.weights[name]):
                return f"first in {name} after update {mine.update}"
    return ""


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _kill_with_children(process: subprocess.Popen) -> None:
    try:
        everyone = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        everyone = []
    process.kill()
    for child in everyone:
        try:
            child.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(everyone, timeout=10)
    process.wait()
