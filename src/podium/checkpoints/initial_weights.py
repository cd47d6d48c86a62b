"""The weights that a new training starts from (`workload.init_from`): those of a run, a checkpoint, a safetensors file
or a folder in Hugging Face's format. Nothing that is read is executed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from podium.checkpoints import huggingface, reading
from podium.contract import Workload
from podium.errors import UserError
from podium.recipe.sections.workload import InitSection
from podium.ui.table import Table

_KEY = "workload.init_from"
_MAX_NAMES = 6


@dataclass(frozen=True)
class Match:
    """Which tensors of a file are tensors of the model."""

    loaded: list[str]
    #: of the model, but not in the file: they keep their initial weights
    missing: list[str]
    #: in the file, but not of the model
    unused: list[str]
    #: of both, in different shapes
    unequal: list[str]


def load_initial_weights(workload: Workload, model: nn.Module, section: InitSection) -> Table:
    """Load the weights that a section names into the model; return a table of what matched.

    Weights of a Hugging Face folder are mapped by the workload, if it knows how; all others are found by name.
    """
    path = section.path.expanduser()
    convert = getattr(workload, "from_huggingface", None)
    if convert is not None and huggingface.is_folder(path) and not section.rename:
        huggingface.start_from(convert, model, path)
        return _table(path, Match(list(model.state_dict()), [], [], []))
    tensors = _renamed(_read(path, section), section.rename)
    match = _matched(model.state_dict(), tensors)
    if not match.loaded:
        raise UserError(
            f"{_KEY} = {path}: none of its tensors is one of the model: it has {_some(list(tensors))}, the model has "
            f"{_some([*match.missing, *match.unequal])}; {_KEY}.rename maps one prefix to another"
        )
    if section.strict and (problem := _problem(match, tensors, model.state_dict())):
        raise UserError(
            f"{_KEY} = {path}: {problem}; {_KEY}.strict=false loads what matches, {_KEY}.rename maps one prefix to "
            "another"
        )
    with torch.no_grad():
        own = model.state_dict()
        for tensor_name in match.loaded:
            own[tensor_name].copy_(tensors[tensor_name])
    return _table(path, match)


def _read(path: Path, section: InitSection) -> dict[str, Tensor]:
    if (path / "checkpoints").is_dir():
        path = _checkpoint_of(path, section)
    if (path / "manifest.json").is_file():
        found = reading.load(path)
        if section.checkpoint == "average":
            if not found.average:
                raise UserError(f"{_KEY}.checkpoint = average: {path} has no averaged weights")
            return {**found.weights, **found.average}
        return found.weights
    if huggingface.is_folder(path):
        try:
            return huggingface.read_tensors(path)
        except UserError as error:
            raise UserError(f"{_KEY} = {path}: {error}") from None
    if path.is_file():
        try:
            return safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{_KEY} = {path}: it is not a good safetensors file: {error}") from None
    if not path.exists():
        raise UserError(f"{_KEY} = {path}: there is no such file or folder")
    raise UserError(
        f"{_KEY} = {path}: expected a run, a checkpoint, a safetensors file or a folder in Hugging Face's format"
    )


def _checkpoint_of(run: Path, section: InitSection) -> Path:
    """Return the checkpoint of a run that the section names."""
    paths = reading.checkpoint_paths(run / "checkpoints")
    if not paths:
        raise UserError(f"{_KEY} = {run}: the run has no checkpoint yet")
    if section.checkpoint != "best":
        return paths[-1]
    best = reading.load(paths[-1]).state.get("progress", {}).get("best_update")
    if best is None:
        raise UserError(f"{_KEY}.checkpoint = best: {run} has no best checkpoint; use last")
    return reading.path_of(run / "checkpoints", best)


def _renamed(tensors: Mapping[str, Tensor], rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace prefixes of names; the longest that fits counts."""
    renamed = {}
    used = set()
    for name, tensor in tensors.items():
        old = max((prefix for prefix in rename if name.startswith(prefix)), key=len, default=None)
        new = name if old is None else rename[old] + name[len(old) :]
        used.add(old)
        if new in renamed:
            raise UserError(f"{_KEY}.rename: two tensors would be called {new!r}")
        renamed[new] = tensor
    if unused := [prefix for prefix in rename if prefix not in used]:
        raise UserError(f"{_KEY}.rename: no tensor begins with {unused[0]!r}; there are {_some(list(tensors))}")
    return renamed


def _matched(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Match:
    both = [name for name in own if name in tensors]
    return Match(
        loaded=[name for name in both if own[name].shape == tensors[name].shape],
        missing=[name for name in own if name not in tensors],
        unused=[name for name in tensors if name not in own],
        unequal=[name for name in both if own[name].shape != tensors[name].shape],
    )


def _problem(match: Match, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    if match.unequal:
        name = match.unequal[0]
        return f"{name} has shape {list(tensors[name].shape)}, but {list(own[name].shape)} in the model"
    if match.missing:
        return f"it lacks {_some(match.missing)} of the model"
    return f"the model has no {_some(match.unused)}" if match.unused else ""


def _table(path: Path, match: Match) -> Table:
    found = {
        "loaded": match.loaded,
        "not in the file: as initialised": match.missing,
        "not in the model: unused": match.unused,
        "other shape: as initialised": match.unequal,
    }
    rows = [[what, str(len(names)), _some(names)] for what, names in found.items() if names]
    return Table(f"Weights from {path}", ["tensors", "number", "names"], rows)


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
