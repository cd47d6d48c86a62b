"""Checkpoints: save, find, verify, restore, prune. Owns the `checkpoint` section.

A checkpoint is a folder `update-00001234/` with safetensors files (data only: loading never executes anything), a
JSON state and a manifest of checksums. It is written aside, synced to disk and renamed: there whole or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from podium.durations import Duration
from podium.engine.agree import agreed, from_first
from podium.engine.instances import Instances
from podium.errors import TrainingFailed, UserError, system_reason
from podium.optim.optimisers import Optimiser, load_state_tensors, state_tensors
from podium.schema import Section

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

    def restore(self, model: nn.Module, optimiser: Optimiser | None = None) -> None:
        """Puts the weights, buffers and optimiser state back, bit for bit."""
        try:
            model.load_state_dict(dict(self.weights), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split("\n\t")[-1].split())
            raise UserError(f"checkpoint {self.path} does not fit the model of the recipe: {detail}") from None
        if optimiser is not None:
            load_state_tensors(optimiser, model, dict(self.optimiser))


def save(
    folder: Path,
    update: int,
    model: nn.Module,
    optimiser: Optimiser,
    state: Mapping[str, Any],
) -> Path:
    """Writes `folder/update-…`; on any failure nothing of it stays and earlier checkpoints are untouched."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise TrainingFailed(f"{name} is not finite after update {update}; the last good checkpoint is kept")
    files = {
        "model.safetensors": safetensors.torch.save(weights),
        "optimiser.safetensors": safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state_tensors(optimiser, model).items()}
        ),
        "state.json": json.dumps({**state, "update": update}, indent=1).encode(),
    }
    manifest = {
        "format": FORMAT,
        "files": {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()
        },
    }
    final = folder / f"{_PREFIX}{update:08d}"
    aside = folder / f"{_ASIDE}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(left_over)
        aside.mkdir()
        for name, data in files.items():
            _write_synced(aside / name, data)
        _write_synced(aside / "manifest.json", json.dumps(manifest, indent=1).encode())
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


def checkpoint_paths(folder: Path) -> list[Path]:
    """All checkpoints in a run's folder, oldest first; what is still being written is not among them."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and checks every byte of it."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["format"] != FORMAT:
            raise UserError(f"checkpoint {path} has format {manifest['format']}, this version reads {FORMAT}")
        data = {name: (path / name).read_bytes() for name in manifest["files"]}
        for name, expected in manifest["files"].items():
            if hashlib.sha256(data[name]).hexdigest() != expected["sha256"]:
                raise UserError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        state = json.loads(data["state.json"])
        return Checkpoint(
            path=path,
            update=state["update"],
            state=state,
            weights=safetensors.torch.load(data["model.safetensors"]),
            optimiser=safetensors.torch.load(data["optimiser.safetensors"]),
        )
    except OSError as error:
        raise UserError(f"checkpoint {path} is damaged: {error.filename or path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
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
               for part in ((found.weights, found.optimiser) if found else ({}, {}))]  # fmt: skip
    weights, optimiser = map(safetensors.torch.load, tensors)
    return Checkpoint(Path(told["path"]), told["state"]["update"], told["state"], weights, optimiser)


def prune(folder: Path, keep: int, best_update: int | None) -> None:
    """Removes all but the newest `keep` and the best."""
    paths = checkpoint_paths(folder)
    for path in paths[:-keep]:
        if best_update is None or path.name != f"{_PREFIX}{best_update:08d}":
            # Renamed first: a half-removed folder must not look like a checkpoint.
            doomed = path.rename(path.with_name(f"{_ASIDE}removed-{path.name}"))
            shutil.rmtree(doomed, ignore_errors=True)


def weights_sha256(model: nn.Module) -> str:
    """Over parameters and buffers in the order of their names: name, type, shape and every bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
