"""Checkpoints are written: copied, put aside, synced to disk and renamed, beside the training that goes on.

What they are, and how they are found and read, is in `checkpoint.py`.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from podium.checkpoint import ASIDE, FORMAT, KINDS, PREFIX, CheckpointSection, checkpoint_paths, prune, remove
from podium.engine.instances import Instances
from podium.engine.parts import Parts, give_over
from podium.errors import PodiumError, TrainingFailed, UserError, system_reason
from podium.held import held_tensors
from podium.optim.optimisers import Optimiser
from podium.optim.state import row_places, state_tensors
from podium.tensor_file import CHECKSUM, write_synced, write_tensors
from podium.threads import stay_single

_LARGE = 1 << 20  # numbers
_LOOK_S = 0.02  # how often the first stage looks whether another has written its part


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of one update holds, apart from the training that goes on."""

    update: int
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    average: dict[str, Tensor]
    state: bytes
    #: the optimiser's state, where it is fetched from its holders while it is written
    parts: Parts | None = None

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
        weights = _copies(held_tensors(model), into.weights if into else {})
        tensors = _copies(state_tensors(optimiser), into.optimiser if into else {})
        averages = _copies(average or {}, into.average if into else {})
        return cls(update, weights, tensors, averages, json.dumps({**state, "update": update}, indent=1).encode())

    @classmethod
    def live(
        cls,
        update: int,
        model: nn.Module,
        parts: Parts,
        state: Mapping[str, Any],
        average: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Copies nothing: it has to be written before the training goes on."""
        text = json.dumps({**state, "update": update}, indent=1).encode()
        return cls(update, dict(model.state_dict()), {}, dict(average or {}), text, parts)


def _copies(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        copy = into.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if _is_large_kernel(tensor):
            from podium.engine.kernel_copies import copy_kernel  # loads a compiler

            copy_kernel(tensor.detach(), copy)
        else:
            copy.copy_(tensor.detach())
        copies[name] = copy
    return copies


def _is_large_kernel(tensor: Tensor) -> bool:
    """Of a convolution of volumes, in memory as its products need it, and large enough for that to matter."""
    suits = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.dim() == 5
    return suits and tensor.numel() >= _LARGE and tensor.permute(2, 3, 4, 1, 0).is_contiguous()


def save(folder: Path, update: int, model: nn.Module, optimiser: Optimiser, state: Mapping[str, Any]) -> Path:
    """Writes `folder/update-…` at once."""
    return write(folder, Snapshot.take(update, model, optimiser, state))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes `folder/update-…`; on any failure nothing of it stays and earlier checkpoints are untouched."""
    _check_finite(snapshot)
    with _writing(folder, snapshot.update):
        aside = _begin(folder, snapshot.update)
        return _complete(aside, {**_write_tensors(aside, snapshot), **_write_state(aside, snapshot)})


Files = dict[str, dict[str, Any]]  # name -> checksum, bytes


def _check_finite(snapshot: Snapshot) -> None:
    for name, tensor in snapshot.weights.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise TrainingFailed(
                f"{name} is not finite after update {snapshot.update}; the last good checkpoint is kept"
            )


def _aside(folder: Path, update: int) -> Path:
    return folder / f"{ASIDE}{PREFIX}{update:08d}"


@contextmanager
def _writing(folder: Path, update: int, remove: bool = True) -> Iterator[None]:
    """Nothing stays of what could not be written whole."""
    try:
        yield
    except (OSError, PodiumError) as error:
        if remove:
            shutil.rmtree(_aside(folder, update), ignore_errors=True)
        if isinstance(error, PodiumError):
            raise
        raise UserError(
            f"the checkpoint of update {update} could not be written to {folder}: {system_reason(error)}; "
            "earlier checkpoints are untouched: once that is solved, `podium resume` continues"
        ) from error


def _begin(folder: Path, update: int) -> Path:
    """An empty folder, beside where the checkpoint will be."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(left_over)
    aside = _aside(folder, update)
    aside.mkdir()
    return aside


def _write_tensors(aside: Path, snapshot: Snapshot, suffix: str = "") -> Files:
    names = {kind: f"{kind}{suffix}.safetensors" for kind in KINDS}
    written = {names["model"]: write_tensors(aside / names["model"], snapshot.weights)}
    parts = snapshot.parts
    written[names["optimiser"]] = write_tensors(
        aside / names["optimiser"],
        snapshot.optimiser if parts is None else parts.like,
        None if parts is None else parts.gathered(),
    )
    if snapshot.average:
        written[names["average"]] = write_tensors(aside / names["average"], snapshot.average)
    return _described(written)


def _write_state(aside: Path, snapshot: Snapshot) -> Files:
    return _described({"state.json": write_synced(aside / "state.json", [memoryview(snapshot.state)])})


def _described(written: Mapping[str, tuple[str, int]]) -> Files:
    return {name: {CHECKSUM: checksum, "bytes": size} for name, (checksum, size) in written.items()}


def _complete(aside: Path, files: Files) -> Path:
    """From here on it is there."""
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
    write_synced(aside / "manifest.json", [memoryview(manifest)])
    _sync_folder(aside)
    final = aside.with_name(aside.name.removeprefix(ASIDE))
    if final.exists():  # saved before this run was resumed from an older one
        shutil.rmtree(final)
    aside.rename(final)
    _sync_folder(final.parent)
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
            remove(other)
    return path


class Saver:
    """Writes checkpoints beside the training, one at a time. Use as a context manager: leaving waits for the last one.

    What goes wrong with one is raised by the next call, or when left.
    """

    def __init__(self, folder: Path, section: CheckpointSection, line: Instances | None = None) -> None:
        """`line` are the instances that hold the stages of the model, each of which has a saver of its own."""
        self._folder, self._section = folder, section
        self._line = line or Instances.alone()
        self._abandoned = threading.Event()
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
        holders: Instances | None = None,
    ) -> None:
        """Copies what is to be saved and returns; waits only where the one before is not written yet.

        Those not to be kept are removed once it is there; `best` is the update of the best one.
        `holders`: the instances, where each holds a part of the state alone. All call it, the first one writes, one
        tensor after the other as they come, and no one has the memory for a copy of it all.
        """
        self.wait()
        if holders is not None:
            parts = Parts(holders, state_tensors(optimiser), row_places(optimiser))
            if holders.index == 0:
                self._write(Snapshot.live(update, model, parts, state, average), best)
            else:
                give_over(parts)
            return
        if self._line.count > 1:
            if self._line.index == 0:
                with _writing(self._folder, update):
                    _begin(self._folder, update)
            self._line.barrier()
        self._last = Snapshot.take(update, model, optimiser, state, self._last, average)
        self._under_way = self._writer.submit(self._write, self._last, best)

    def wait(self) -> None:
        """Returns when the last one is on the disk; raises what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        if self._line.count == 1:
            write(self._folder, snapshot)
        else:
            self._write_shard(snapshot)
        if self._line.index == 0:
            prune(self._folder, self._section.keep, best if self._section.best else None)

    def _write_shard(self, snapshot: Snapshot) -> None:
        """The files of this stage; the first one waits for the others' and completes the checkpoint."""
        aside, index, count = _aside(self._folder, snapshot.update), self._line.index, self._line.count
        with _writing(self._folder, snapshot.update, remove=index == 0):
            try:
                _check_finite(snapshot)
                files = _write_tensors(aside, snapshot, f"-{index + 1}-of-{count}")
            except (OSError, PodiumError) as error:
                with suppress(OSError):
                    _tell(aside, index, {"error": str(error)})
                raise
            if index:
                _tell(aside, index, files)
                return
            for other in range(1, count):
                files |= self._told(aside, other)
            _complete(aside, files | _write_state(aside, snapshot))

    def _told(self, aside: Path, other: int) -> Files:
        """What another stage has written; it may take as long as any message may."""
        path, deadline = aside / _shard_file(other), time.monotonic() + self._line.timeout_s
        while not path.exists():
            if self._abandoned.wait(_LOOK_S) or time.monotonic() > deadline:
                raise UserError(
                    f"stage {other} did not write its part of the checkpoint {aside.name.removeprefix(ASIDE)}"
                )
        files: Files = json.loads(path.read_bytes())
        if "error" in files:
            raise UserError(f"stage {other} could not write its part of the checkpoint: {files['error']}")
        path.unlink()
        return files

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandoned.set()
        with suppress(PodiumError) if kind is not None else nullcontext():  # one reason to end is enough
            self.wait()
        self._writer.shutdown()


def _shard_file(index: int) -> str:
    return f"stage-{index}.json"


def _tell(aside: Path, index: int, told: Mapping[str, Any]) -> None:
    """For the first stage, there whole or not at all."""
    part = aside / f".{_shard_file(index)}"
    part.write_bytes(json.dumps(told).encode())
    part.rename(aside / _shard_file(index))


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
