"""Writing checkpoints while training continues: copied, written under a temporary name, synced to disk and renamed.

`reading.py` describes their form, and finds and reads them.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from podium.checkpoints.pruning import Pruner
from podium.checkpoints.reading import ASIDE, FORMAT, KINDS, PREFIX, checkpoint_paths, remove
from podium.checkpoints.tensor_file import CHECKSUM, write_synced, write_tensors
from podium.distributed.instances import Instances
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.distributed.sharding.gather_tensors import GatheredTensors, send_pieces
from podium.errors import PodiumError, TrainingFailed, UserError, system_reason
from podium.kernels.in_order import copy_in_order
from podium.machine.threads import stay_single
from podium.optim.optimisers import Optimiser
from podium.optim.state_tensors import row_places, state_tensors
from podium.recipe.sections.checkpoint import CheckpointSection

_POLL_S = 0.02  # how often the first stage checks whether another has written its part


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint of one update, independent of the training that continues."""

    update: int
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    average: dict[str, Tensor]
    state: bytes
    #: the optimiser state, where it is gathered from its holders while it is written
    parts: GatheredTensors | None = None
    #: when an accelerator has copied everything
    copied: torch.Event | None = None

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
        """Copy everything to the host; `into` is a snapshot no longer needed, whose memory is reused."""
        weights = _copies(local_tensors(model), into.weights if into else {})
        tensors = _copies(state_tensors(optimiser), into.optimiser if into else {})
        averages = _copies(average or {}, into.average if into else {})
        text = json.dumps({**state, "update": update}, indent=1).encode()
        return cls(update, weights, tensors, averages, text, copied=_event_of(model))

    @classmethod
    def live(
        cls,
        update: int,
        model: nn.Module,
        parts: GatheredTensors,
        state: Mapping[str, Any],
        average: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return a snapshot without copying; it has to be written before the training continues."""
        text = json.dumps({**state, "update": update}, indent=1).encode()
        return cls(update, dict(model.state_dict()), {}, dict(average or {}), text, parts)


def _event_of(model: nn.Module) -> torch.Event | None:
    """Return an event after all that the device of a model has to do so far; None on a CPU."""
    device = next((param.device for param in model.parameters() if param.device.type not in ("cpu", "meta")), None)
    if device is None:
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _copies(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        copy = into.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type not in ("cpu", "mps"))
        copy_in_order(tensor, copy, later=True)
        copies[name] = copy
    return copies


def save(folder: Path, update: int, model: nn.Module, optimiser: Optimiser, state: Mapping[str, Any]) -> Path:
    """Write `folder/update-…` synchronously."""
    return write(folder, Snapshot.take(update, model, optimiser, state))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/update-…`; on any failure, nothing of it remains and earlier checkpoints are untouched."""
    if snapshot.copied is not None:
        snapshot.copied.synchronize()
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
    """Remove what could not be written completely, and turn OSError into UserError."""
    try:
        yield
    except (OSError, PodiumError) as error:
        if remove:
            shutil.rmtree(_aside(folder, update), ignore_errors=True)
        if isinstance(error, PodiumError):
            raise
        raise UserError(
            f"the checkpoint of update {update} could not be written to {folder}: {system_reason(error)}; "
            "earlier checkpoints are untouched: solve the problem, then continue with `podium resume`"
        ) from error


def _begin(folder: Path, update: int) -> Path:
    """Create an empty folder next to where the checkpoint will be."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(left_over, ignore_errors=True)  # what is not a folder is not ours
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
    """Write the manifest and rename the folder: from here on the checkpoint exists."""
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
    write_synced(aside / "manifest.json", [memoryview(manifest)])
    _sync_folder(aside)
    final = aside.with_name(aside.name.removeprefix(ASIDE))
    if final.exists():  # saved before the run was resumed from an older checkpoint
        shutil.rmtree(final)
    aside.rename(final)
    _sync_folder(final.parent)
    return final


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    A sum is finite only if all values are, and ten times as fast as checking each value, which is done only if the sum
    is not finite.
    """
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def write_weights(folder: Path, update: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint of weights only, to validate and predict with; it replaces any earlier one."""
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    path = write(folder, Snapshot(update, contiguous, {}, {}, json.dumps({**state, "update": update}).encode()))
    for other in checkpoint_paths(folder):
        if other != path:
            remove(other)
    return path


class Saver:
    """A writer of checkpoints while training continues, one at a time. A context manager: on exit it waits for the
    last one.

    An error in writing one is raised by the next call, or on exit.
    """

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        pipeline_group: Instances | None = None,
        tell: Callable[[int, Path], None] = lambda update, path: None,
    ) -> None:
        """Start the thread that writes. `pipeline_group`: the instances that hold the stages of the model, each of
        which has its own saver. `tell` is called with update and folder of a checkpoint that is on the disk, by the
        thread that calls this object."""
        # absolute: the thread that writes must not depend on where the process is at that moment
        self._folder, self._section, self._tell = folder.absolute(), section, tell
        self._pipeline_group = pipeline_group or Instances.alone()
        self._abandoned = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="podium-checkpoint", initializer=stay_single)
        self._under_way: Future[Path | None] | None = None
        self._last: Snapshot | None = None
        self._pruner = Pruner(folder)

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
        """Copy what is to be saved and return; wait only if the previous checkpoint is not written yet.

        Once it is written, checkpoints that need not be kept are removed; `best` is the update of the best one.
        `holders`: the instances, where each holds only a part of the state. All of them call this; instance 0 writes
        one tensor after the other as it receives them, as no instance has the memory for a copy of everything.
        """
        self.wait()
        if holders is not None:
            parts = GatheredTensors(holders, state_tensors(optimiser), row_places(optimiser))
            if holders.index == 0:
                self._told(self._write(Snapshot.live(update, model, parts, state, average), best))
            else:
                send_pieces(parts)
            return
        if self._pipeline_group.count > 1:
            if self._pipeline_group.index == 0:
                with _writing(self._folder, update):
                    _begin(self._folder, update)
            self._pipeline_group.barrier()
        self._last = Snapshot.take(update, model, optimiser, state, self._last, average)
        self._under_way = self._writer.submit(self._write, self._last, best)

    def written(self) -> set[int]:
        """Return the updates whose checkpoints are on the disk, or are being written by this object."""
        under_way = {self._last.update} if self._last is not None and self._under_way is not None else set()
        return {int(path.name.removeprefix(PREFIX)) for path in checkpoint_paths(self._folder)} | under_way

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; raise the error if it could not be written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._told(under_way.result())

    def tell_if_written(self) -> None:
        """Tell of the last checkpoint if it is on the disk by now; one that could not be written is told later."""
        if self._under_way is not None and self._under_way.done() and self._under_way.exception() is None:
            self.wait()

    def _told(self, written: Path | None) -> None:
        if written is not None:
            self._tell(int(written.name.removeprefix(PREFIX)), written)

    def _write(self, snapshot: Snapshot, best: int | None) -> Path | None:
        if self._pipeline_group.count == 1:
            written: Path | None = write(self._folder, snapshot)
        else:
            written = self._write_shard(snapshot)
        if written is not None:
            self._pruner.has_written(written)
            self._pruner.prune(self._section.keep, best if self._section.best else None)
        return written

    def _write_shard(self, snapshot: Snapshot) -> Path | None:
        """Write the files of this stage; the first stage waits for those of the others, completes the checkpoint and
        returns its path."""
        aside, index, count = (
            _aside(self._folder, snapshot.update),
            self._pipeline_group.index,
            self._pipeline_group.count,
        )
        with _writing(self._folder, snapshot.update, remove=index == 0):
            try:
                if snapshot.copied is not None:
                    snapshot.copied.synchronize()
                _check_finite(snapshot)
                files = _write_tensors(aside, snapshot, f"-{index + 1}-of-{count}")
            except (OSError, PodiumError) as error:
                with suppress(OSError):
                    _write_shard_file(aside, index, {"error": str(error)})
                raise
            if index:
                _write_shard_file(aside, index, files)
                return None
            for other in range(1, count):
                files |= self._files_of_stage(aside, other)
            return _complete(aside, files | _write_state(aside, snapshot))

    def _files_of_stage(self, aside: Path, other: int) -> Files:
        """Wait for the files of another stage, for as long as any message may take, and return them."""
        path, deadline = aside / _shard_file(other), time.monotonic() + self._pipeline_group.timeout_s
        while not path.exists():
            if self._abandoned.wait(_POLL_S) or time.monotonic() > deadline:
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
        with suppress(PodiumError) if kind is not None else nullcontext():  # the first error is the one to report
            self.wait()
        self._writer.shutdown()


def _shard_file(index: int) -> str:
    return f"stage-{index}.json"


def _write_shard_file(aside: Path, index: int, files: Mapping[str, Any]) -> None:
    """Write the message for the first stage, completely or not at all."""
    part = aside / f".{_shard_file(index)}"
    part.write_bytes(json.dumps(files).encode())
    part.rename(aside / _shard_file(index))


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
