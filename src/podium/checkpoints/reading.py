"""Finding, verifying and restoring checkpoints; `writing.py` writes them, `pruning.py` removes old ones.

A checkpoint is a folder `update-00001234/` with safetensors files (data only: loading never executes anything), a
JSON state and a manifest of checksums. It is written under a temporary name, synced to disk and renamed, so it exists
completely or not at all.

Where the model is cut into stages, each stage writes its own files (`model-2-of-4.safetensors`) into the same folder;
together they hold what a single file would, and any number of stages can read them.
"""

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
from podium.errors import UserError, system_reason
from podium.machine.bounded_files import FACTS_BYTES, parse_mapping, read_limited
from podium.optim.optimisers import Optimiser
from podium.optim.own import layout_of
from podium.optim.state_tensors import check_state, load_state_tensors, row_places, state_loaded, state_tensors

#: since 2, files may have checksums other than sha256
FORMAT = 2
PREFIX, ASIDE = "update-", ".writing-"
KINDS = ("model", "optimiser", "average")  # the kinds of files with tensors
_STATE_BYTES = 64 << 20
_NAME = re.compile(rf"{PREFIX}([0-9]{{8,18}})")
_FILE = re.compile(rf"state\.json|({'|'.join(KINDS)})(-[0-9]+-of-[0-9]+)?\.safetensors")


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
            detail = " ".join(str(error).split("\n\t")[-1].split())[:300].rstrip(".")
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
        if optimiser.own is not None:  # there is none before its first step: make what the checkpoint has
            layout = layout_of(self.optimiser) if holders.index == 0 else []
            state = optimiser.own.blank(broadcast_facts(holders, {"layout": layout})["layout"])
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
    found = {path: match for path in folder.glob(f"{PREFIX}*") if (match := _NAME.fullmatch(path.name))}
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(found[path][1]))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify all of its checksums."""
    try:
        parts = {}
        for name, (kind, checksum, num_bytes) in _listed(path).items():
            if name == "state.json" and (path / name).stat().st_size > _STATE_BYTES:
                raise ValueError(f"state.json has more than {_STATE_BYTES:,} bytes")
            parts[name] = read_checked(path / name, kind, num_bytes)
            if parts[name][1] != checksum:
                raise ValueError(f"{name} does not match its checksum")
        if "state.json" not in parts:
            raise ValueError("its manifest lists no state.json")
        state = parse_mapping(parts["state.json"][0].numpy().tobytes())
        if type(state.get("update")) is not int or not 0 <= state["update"] < 2**63:
            raise ValueError("state.json does not say of which update it is")
        if (named := _NAME.fullmatch(path.name)) and int(named[1]) != state["update"]:
            raise ValueError(f"it holds the state of update {state['update']}")
        joined: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for name, (data, _) in parts.items():
            if name.endswith(".safetensors"):
                joined[re.split(r"[-.]", name)[0]] |= tensors_in(data)
        if not joined["model"]:
            raise ValueError("it holds no weights")
        return Checkpoint(
            path=path,
            update=state["update"],
            state=state,
            weights=joined["model"],
            optimiser=joined["optimiser"],
            average=joined["average"],
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"checkpoint {path} is damaged: {where}{system_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"checkpoint {path} is damaged: {error}") from None


def _listed(path: Path) -> dict[str, tuple[str, str, int | None]]:
    """Return the files of a checkpoint as its manifest lists them: kind of checksum, checksum, bytes."""
    manifest = parse_mapping(read_limited(path / "manifest.json", FACTS_BYTES))
    form, files = manifest.get("format"), manifest.get("files")
    if type(form) is int and form > FORMAT:
        raise UserError(f"checkpoint {path} has format {str(form)[:20]}, but this version reads 1 to {FORMAT}")
    if type(form) is not int or form < 1 or not isinstance(files, dict):
        raise ValueError("its manifest lists no files")
    listed = {}
    for name, expected in files.items():
        kinds = CHECKSUMS.keys() & (expected.keys() if isinstance(expected, dict) else set())
        num_bytes = expected.get("bytes") if kinds else None
        # No other folder's files, and nothing that a checkpoint does not consist of
        if not _FILE.fullmatch(name) or len(kinds) != 1 or type(num_bytes) not in (int, type(None)):
            raise ValueError(f"its manifest lists {name[:80]!r} in a way that no checkpoint has")
        (kind,) = kinds
        listed[name] = (kind, expected[kind], num_bytes)
    return listed


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


def shared(found: Checkpoint | None, instances: Instances, *, whole: bool = True, source: int = 0) -> Checkpoint | None:
    """Broadcast the checkpoint that instance `source` found to all instances, which may not have access to the run
    folder.

    Unless `whole`, only that instance gets the optimiser state.
    """
    if instances.count == 1:
        return found
    facts = broadcast_facts(instances, {"path": str(found.path), "state": dict(found.state)} if found else {}, source)
    if not facts:
        return None
    optimiser = found.optimiser if found else {}
    sent = (found.weights, optimiser if whole else {}, found.average) if found else ({}, {}, {})
    received = [
        broadcast_bytes(instances, safetensors.torch.save(dict(part)) if found else None, source) for part in sent
    ]
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
