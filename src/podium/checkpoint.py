"""Checkpoints: save, find, verify, restore, prune. Owns the `checkpoint` section.

A checkpoint is a folder `update-00001234/` with safetensors files (data only: loading never executes anything), a
JSON state and a manifest of checksums. It is written aside, synced to disk and renamed: there whole or not at all.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from podium.durations import Duration
from podium.engine.agree import agreed, from_first
from podium.engine.instances import Instances
from podium.errors import PodiumError, TrainingFailed, UserError, system_reason
from podium.optim.optimisers import Optimiser, load_state_tensors, state_tensors
from podium.schema import Section
from podium.tensor_file import read_checked, tensors_in, write_synced, write_tensors
from podium.threads import stay_single

FORMAT = 1
_PREFIX, _ASIDE = "update-", ".writing-"


class CheckpointSection(Section):
    """When to save and what to keep."""

    every: Duration = Duration(1, "ep")
    #: the newest so many are kept
    keep: PositiveInt = 2
    #: the one with the best validation loss is kept too (and saved when it is found)
    best: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose checksums were right when it was read."""

    path: Path
    update: int
    state: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    #: of weights, where the training keeps one
    average: Mapping[str, Tensor] = field(default_factory=dict)

    def restore(self, model: nn.Module, optimiser: Optimiser | None = None) -> None:
        """Puts the weights, buffers and optimiser state back, bit for bit."""
        try:
            model.load_state_dict(dict(self.weights), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split("\n\t")[-1].split())
            raise UserError(f"checkpoint {self.path} does not fit the model of the recipe: {detail}") from None
        if optimiser is not None:
            load_state_tensors(optimiser, model, dict(self.optimiser))


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of one update holds, apart from the training that goes on."""

    update: int
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    average: dict[str, Tensor]
    state: bytes

    @classmethod
    def take(
        cls,
        update: int,
        model: nn.Module,
        optimiser: Optimiser,
        state: Mapping[str, Any],
        into: "Snapshot | None" = None,
        average: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Copies everything to the host; `into` gives the memory of a snapshot that is not needed any more."""
        weights = _copies(model.state_dict(), into.weights if into else {})
        tensors = _copies(state_tensors(optimiser, model), into.optimiser if into else {})
        averages = _copies(average or {}, into.average if into else {})
        return cls(update, weights, tensors, averages, json.dumps({**state, "update": update}, indent=1).encode())


def _copies(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        copy = into.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = copy.copy_(tensor.detach())
    return copies


def save(folder: Path, update: int, model: nn.Module, optimiser: Optimiser, state: Mapping[str, Any]) -> Path:
    """Writes `folder/update-…` at once."""
    return write(folder, Snapshot.take(update, model, optimiser, state))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes `folder/update-…`; on any failure nothing of it stays and earlier checkpoints are untouched."""
    update = snapshot.update
    for name, tensor in snapshot.weights.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise TrainingFailed(f"{name} is not finite after update {update}; the last good checkpoint is kept")
    final = folder / f"{_PREFIX}{update:08d}"
    aside = folder / f"{_ASIDE}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(left_over)
        aside.mkdir()
        written = {
            "model.safetensors": write_tensors(aside / "model.safetensors", snapshot.weights),
            "optimiser.safetensors": write_tensors(aside / "optimiser.safetensors", snapshot.optimiser),
            "state.json": write_synced(aside / "state.json", [memoryview(snapshot.state)]),
        }
        if snapshot.average:
            written["average.safetensors"] = write_tensors(aside / "average.safetensors", snapshot.average)
        files = {name: {"sha256": sha256, "bytes": size} for name, (sha256, size) in written.items()}
        manifest = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
        write_synced(aside / "manifest.json", [memoryview(manifest)])
        _sync_folder(aside)
        if final.exists():  # saved before this run was resumed from an older one
            shutil.rmtree(final)
        aside.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"the checkpoint of update {update} could not be written to {folder}: {system_reason(error)}; "
            "earlier checkpoints are untouched: once that is solved, `podium resume` continues"
        ) from error
    return final


def _is_finite(tensor: Tensor) -> bool:
    """A sum is finite only where all values are, and ten times as fast as a look at each: that comes if it is not."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def write_weights(folder: Path, update: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """A checkpoint of weights alone, to validate and predict with; it takes the place of an earlier one."""
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    path = write(folder, Snapshot(update, contiguous, {}, {}, json.dumps({**state, "update": update}).encode()))
    for other in checkpoint_paths(folder):
        if other != path:
            _remove(other)
    return path


class Saver:
    """Writes checkpoints beside the training, one at a time. Use as a context manager: leaving waits for the last one.

    What goes wrong with one is raised by the next call, or when left.
    """

    def __init__(self, folder: Path, section: CheckpointSection) -> None:
        self._folder, self._section = folder, section
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="podium-checkpoint", initializer=stay_single)
        self._under_way: Future[None] | None = None
        self._last: Snapshot | None = None

    def save(
        self,
        update: int,
        model: nn.Module,
        optimiser: Optimiser,
        state: Mapping[str, Any],
        best: int | None,
        average: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copies what is to be saved and returns; waits only where the one before is not written yet.

        Those not to be kept are removed once it is there; `best` is the update of the best one.
        """
        self.wait()
        self._last = Snapshot.take(update, model, optimiser, state, self._last, average)
        self._under_way = self._writer.submit(self._write, self._last, best)

    def wait(self) -> None:
        """Returns when the last one is on the disk; raises what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        write(self._folder, snapshot)
        prune(self._folder, self._section.keep, best if self._section.best else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(PodiumError) if kind is not None else nullcontext():  # one reason to end is enough
            self.wait()
        self._writer.shutdown()


def checkpoint_paths(folder: Path) -> list[Path]:
    """All checkpoints in a run's folder, oldest first; what is still being written is not among them."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and checks every byte of it."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["format"] != FORMAT:
            raise UserError(f"checkpoint {path} has format {manifest['format']}, this version reads {FORMAT}")
        parts = {name: read_checked(path / name) for name in manifest["files"]}
        for name, expected in manifest["files"].items():
            if parts[name][1] != expected["sha256"]:
                raise UserError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        state = json.loads(parts["state.json"][0].numpy().tobytes())
        return Checkpoint(
            path=path,
            update=state["update"],
            state=state,
            weights=tensors_in(parts["model.safetensors"][0]),
            optimiser=tensors_in(parts["optimiser.safetensors"][0]) if "optimiser.safetensors" in parts else {},
            average=tensors_in(parts["average.safetensors"][0]) if "average.safetensors" in parts else {},
        )
    except OSError as error:
        raise UserError(f"checkpoint {path} is damaged: {error.filename or path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint {path} is damaged: {error}") from None


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint; damaged ones are skipped with a message. None where there is none at all."""
    paths = checkpoint_paths(folder)
    for path in reversed(paths):
        try:
            return load(path)
        except UserError as error:
            warn(f"{error}; trying the one before")
    if paths:
        raise UserError(f"none of the {len(paths)} checkpoints in {folder} is good")
    return None


def shared(found: Checkpoint | None, instances: Instances) -> Checkpoint | None:
    """The checkpoint that instance 0 found, given to all: others may have no access to the run folder."""
    if instances.count == 1:
        return found
    told = agreed(instances, {"path": str(found.path), "state": dict(found.state)} if found else {})
    if not told:
        return None
    tensors = [from_first(instances, safetensors.torch.save(dict(part)) if found else None)
               for part in ((found.weights, found.optimiser, found.average) if found else ({}, {}, {}))]  # fmt: skip
    weights, optimiser, average = map(safetensors.torch.load, tensors)
    return Checkpoint(Path(told["path"]), told["state"]["update"], told["state"], weights, optimiser, average)


def path_of(folder: Path, update: int) -> Path:
    """The checkpoint of one update; UserError where there is none."""
    path = folder / f"{_PREFIX}{update:08d}"
    if not path.is_dir():
        known = ", ".join(str(int(path.name.removeprefix(_PREFIX))) for path in checkpoint_paths(folder)) or "none"
        raise UserError(f"{folder.parent} has no checkpoint of update {update} (there are: {known})")
    return path


def go_back(folder: Path, update: int) -> list[Path]:
    """Removes all checkpoints after that of `update`, which must be good; returns them."""
    kept = path_of(folder, update)
    load(kept)
    newer = [path for path in checkpoint_paths(folder) if path.name > kept.name]
    for path in newer:
        _remove(path)
    return newer


def _remove(path: Path) -> None:
    # Renamed first: a half-removed folder must not look like a checkpoint.
    doomed = path.rename(path.with_name(f"{_ASIDE}removed-{path.name}"))
    shutil.rmtree(doomed, ignore_errors=True)


def prune(folder: Path, keep: int, best_update: int | None) -> None:
    """Removes all but the newest `keep` and the best."""
    paths = checkpoint_paths(folder)
    for path in paths[:-keep]:
        if best_update is None or path.name != f"{_PREFIX}{best_update:08d}":
            _remove(path)


def weights_sha256(model: nn.Module) -> str:
    """Over parameters and buffers in the order of their names: name, type, shape and every bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
