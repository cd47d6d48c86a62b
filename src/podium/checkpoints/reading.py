"""Finding, verifying and restoring checkpoints; `writing.py` writes them, `pruning.py` removes old ones.

A checkpoint is a folder `update-00001234/` with safetensors files (data only: loading never executes anything), a
JSON state and a manifest of checksums. It is written under a temporary name, synced to disk and renamed, so it exists
completely or not at all.

Where the model is cut into stages, each stage writes its own files (`model-2-of-4.safetensors`) into the same folder;
together they hold what a single file would, and any number of stages can read them.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from podium.checkpoints.tensor_file import CHECKSUMS, read_checked, tensors_in
from podium.distributed.instances import Instances
from podium.distributed.messages import broadcast_bytes, broadcast_facts
from podium.distributed.pipeline.meta_blocks import remote_names
from podium.distributed.sharding.gather_tensors import GatheredTensors
from podium.errors import UserError
from podium.optim.optimisers import Optimiser
from podium.optim.state_tensors import check_state, load_state_tensors, row_places, state_loaded, state_tensors

#: since 2, files may have checksums other than sha256
FORMAT = 2
PREFIX, ASIDE = "update-", ".writing-"
KINDS = ("model", "optimiser", "average")  # the kinds of files with tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk, with verified checksums."""

    path: Path
    update: int
    state: Mapping[str, Any]
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    #: averaged weights, where the training keeps an average
    average: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, model: nn.Module, optimiser: Optimiser | None = None) -> None:
        """Restore weights, buffers and optimiser state bit for bit; only the local part, where other instances hold
        parts of the model."""
        known, elsewhere = model.state_dict().keys(), remote_names(model)
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
        """Restore the optimiser state. `holders`: the instances, where each holds only a part of the state and
        instance 0 has read the checkpoint."""
        if holders is None:
            elsewhere = {name for param, name in optimiser.names.items() if param.is_meta}
            # Names are those of state_tensors(): slot/parameter.
            own = {key: value for key, value in self.optimiser.items() if key.partition("/")[2] not in elsewhere}
            load_state_tensors(optimiser, own)
            return
        state = state_tensors(optimiser)
        parts = GatheredTensors(holders, state, row_places(optimiser))
        problem = ""
        if holders.index == 0:
            try:
                check_state(optimiser, parts.like, self.optimiser)
            except UserError as error:
                problem = str(error)
        if problem := broadcast_facts(holders, {"problem": problem})["problem"]:
            raise UserError(problem)
        parts.scatter(self.optimiser if holders.index == 0 else None)
        state_loaded(optimiser, state)

    def forget_tensors(self) -> None:
        """Free the tensors once they are restored, as the run no longer needs them."""
        for tensors in (self.weights, self.optimiser, self.average):
            tensors.clear()


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return all complete checkpoints in a run's folder, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify all of its checksums."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["format"] not in range(1, FORMAT + 1):
            raise UserError(f"checkpoint {path} has format {manifest['format']}, but this version reads 1 to {FORMAT}")
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
    """Return the newest good checkpoint, or None if there are no checkpoints; damaged ones are skipped with a
    warning."""
    paths = checkpoint_paths(folder)
    for path in reversed(paths):
        try:
            return load(path)
        except UserError as error:
            warn(f"{error}; trying the previous one")
    if paths:
        raise UserError(f"none of the {len(paths)} checkpoints in {folder} is good")
    return None


def shared(found: Checkpoint | None, instances: Instances, *, whole: bool = True) -> Checkpoint | None:
    """Broadcast the checkpoint that instance 0 found to all instances, which may not have access to the run folder.

    Unless `whole`, only instance 0 gets the optimiser state.
    """
    if instances.count == 1:
        return found
    facts = broadcast_facts(instances, {"path": str(found.path), "state": dict(found.state)} if found else {})
    if not facts:
        return None
    optimiser = found.optimiser if found else {}
    sent = (found.weights, optimiser if whole else {}, found.average) if found else ({}, {}, {})
    received = [broadcast_bytes(instances, safetensors.torch.save(dict(part)) if found else None) for part in sent]
    weights, received_optimiser, average = map(safetensors.torch.load, received)
    optimiser = received_optimiser if whole else optimiser
    return Checkpoint(Path(facts["path"]), facts["state"]["update"], facts["state"], weights, optimiser, average)


def path_of(folder: Path, update: int) -> Path:
    """Return the path of the checkpoint of one update; raise UserError if there is none."""
    path = folder / f"{PREFIX}{update:08d}"
    if not path.is_dir():
        known = ", ".join(str(int(path.name.removeprefix(PREFIX))) for path in checkpoint_paths(folder)) or "none"
        raise UserError(f"{folder.parent} has no checkpoint of update {update} (there are: {known})")
    return path


def go_back(folder: Path, update: int) -> list[Path]:
    """Remove all checkpoints after that of `update`, which must be good; return their paths."""
    kept = path_of(folder, update)
    load(kept)
    newer = [path for path in checkpoint_paths(folder) if path.name > kept.name]
    for path in newer:
        remove(path)
    return newer


def remove(path: Path) -> None:
    """Remove a checkpoint."""
    # Renamed first, as a half-removed folder must not look like a checkpoint.
    doomed = path.rename(path.with_name(f"{ASIDE}removed-{path.name}"))
    shutil.rmtree(doomed, ignore_errors=True)
