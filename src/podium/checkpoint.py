"""Checkpoints: find, verify, restore, prune; `saving.py` writes them. Owns the `checkpoint` section.

A checkpoint is a folder `update-00001234/` with safetensors files (data only: loading never executes anything), a
JSON state and a manifest of checksums. It is written aside, synced to disk and renamed: there whole or not at all.

Where the model is cut into stages, each stage writes files of its own (`model-2-of-4.safetensors`) into the same
folder; together they are what one file would be, and any number of stages reads them.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from podium.durations import Duration
from podium.engine.agree import agreed, from_first
from podium.engine.instances import Instances
from podium.engine.parts import Parts
from podium.errors import UserError
from podium.held import elsewhere_of, held_tensors
from podium.optim.optimisers import Optimiser
from podium.optim.state import check_state, load_state_tensors, row_places, state_loaded, state_tensors
from podium.schema import Section
from podium.tensor_file import CHECKSUMS, read_checked, tensors_in

#: since 2, files may have other checksums than sha256
FORMAT = 2
PREFIX, ASIDE = "update-", ".writing-"
KINDS = ("model", "optimiser", "average")  # of files with tensors


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
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    #: of weights, where the training keeps one
    average: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, model: nn.Module, optimiser: Optimiser | None = None) -> None:
        """Puts the weights, buffers and optimiser state back, bit for bit; of what is held here, where others hold a
        part of the model."""
        known, elsewhere = model.state_dict().keys(), elsewhere_of(model)
        weights = {name: tensor for name, tensor in self.weights.items() if name not in elsewhere}
        try:
            found = model.load_state_dict(weights, strict=not elsewhere)
            if odd := [*found.unexpected_keys, *(known - self.weights.keys())]:
                raise RuntimeError(f"{min(odd)} is {'missing' if min(odd) in known else 'not part of it'}")
        except RuntimeError as error:
            detail = " ".join(str(error).split("\n\t")[-1].split())
            raise UserError(f"checkpoint {self.path} does not fit the model of the recipe: {detail}") from None
        if optimiser is not None:
            self.restore_optimiser(optimiser)

    def restore_optimiser(self, optimiser: Optimiser, holders: Instances | None = None) -> None:
        """`holders`: the instances, where each holds a part of the state alone and instance 0 has what was saved."""
        if holders is None:
            elsewhere = {name for param, name in optimiser.names.items() if param.is_meta}
            # Names are those of state_tensors: slot/parameter.
            own = {key: value for key, value in self.optimiser.items() if key.partition("/")[2] not in elsewhere}
            load_state_tensors(optimiser, own)
            return
        state = state_tensors(optimiser)
        parts = Parts(holders, state, row_places(optimiser))
        problem = ""
        if holders.index == 0:
            try:
                check_state(optimiser, parts.like, self.optimiser)
            except UserError as error:
                problem = str(error)
        if problem := agreed(holders, {"problem": problem})["problem"]:
            raise UserError(problem)
        parts.spread(self.optimiser if holders.index == 0 else None)
        state_loaded(optimiser, state)

    def forget_tensors(self) -> None:
        """Once they are restored: a run that goes on for days has no use for them."""
        for tensors in (self.weights, self.optimiser, self.average):
            tensors.clear()


def checkpoint_paths(folder: Path) -> list[Path]:
    """All checkpoints in a run's folder, oldest first; what is still being written is not among them."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and checks every byte of it."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["format"] not in range(1, FORMAT + 1):
            raise UserError(f"checkpoint {path} has format {manifest['format']}, this version reads 1 to {FORMAT}")
        parts = {}
        for name, expected in manifest["files"].items():
            (kind,) = CHECKSUMS.keys() & expected.keys()
            parts[name] = read_checked(path / name, kind)
            if parts[name][1] != expected[kind]:
                raise UserError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        state = json.loads(parts["state.json"][0].numpy().tobytes())
        joined: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for name, (data, _) in parts.items():
            if name.endswith(".safetensors"):
                joined[re.split(r"[-.]", name)[0]] |= tensors_in(data)
        if not joined["model"]:
            raise KeyError("model.safetensors")
        return Checkpoint(
            path=path,
            update=state["update"],
            state=state,
            weights=joined["model"],
            optimiser=joined["optimiser"],
            average=joined["average"],
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


def shared(found: Checkpoint | None, instances: Instances, *, whole: bool = True) -> Checkpoint | None:
    """The checkpoint that instance 0 found, given to all: others may have no access to the run folder.

    Unless `whole`, only instance 0 has the optimiser's state.
    """
    if instances.count == 1:
        return found
    told = agreed(instances, {"path": str(found.path), "state": dict(found.state)} if found else {})
    if not told:
        return None
    optimiser = found.optimiser if found else {}
    sent = (found.weights, optimiser if whole else {}, found.average) if found else ({}, {}, {})
    received = [from_first(instances, safetensors.torch.save(dict(part)) if found else None) for part in sent]
    weights, given, average = map(safetensors.torch.load, received)
    optimiser = given if whole else optimiser
    return Checkpoint(Path(told["path"]), told["state"]["update"], told["state"], weights, optimiser, average)


def path_of(folder: Path, update: int) -> Path:
    """The checkpoint of one update; UserError where there is none."""
    path = folder / f"{PREFIX}{update:08d}"
    if not path.is_dir():
        known = ", ".join(str(int(path.name.removeprefix(PREFIX))) for path in checkpoint_paths(folder)) or "none"
        raise UserError(f"{folder.parent} has no checkpoint of update {update} (there are: {known})")
    return path


def go_back(folder: Path, update: int) -> list[Path]:
    """Removes all checkpoints after that of `update`, which must be good; returns them."""
    kept = path_of(folder, update)
    load(kept)
    newer = [path for path in checkpoint_paths(folder) if path.name > kept.name]
    for path in newer:
        remove(path)
    return newer


def remove(path: Path) -> None:
    # Renamed first: a half-removed folder must not look like a checkpoint.
    doomed = path.rename(path.with_name(f"{ASIDE}removed-{path.name}"))
    shutil.rmtree(doomed, ignore_errors=True)


def prune(folder: Path, keep: int, best_update: int | None) -> None:
    """Removes all but the newest `keep` and the best."""
    paths = checkpoint_paths(folder)
    for path in paths[:-keep]:
        if best_update is None or path.name != f"{PREFIX}{best_update:08d}":
            remove(path)


def weights_sha256(model: nn.Module) -> str:
    """Over parameters and buffers in the order of their names: name, type, shape and every bit. Of those held here."""
    return sha256_of(sorted(held_tensors(model).items()))


def sha256_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """The same over named tensors, in the order in which they come."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
