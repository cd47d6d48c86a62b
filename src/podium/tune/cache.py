"""What was measured, saved per machine, torch and shape of the training in the user's cache folder."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from podium import __version__
from podium.errors import UserError
from podium.machine import processor
from podium.machine.cache_folder import cache_folder
from podium.recipe.loading import Recipe
from podium.runs.folder import write_json
from podium.topology import usable_cores
from podium.workloads.registry import identity, short_name

FORMAT = 1


@dataclass(frozen=True)
class Outcome:
    """The outcome of one tuning. Keys are recipe keys or `instances`; a key that is missing stays as it is."""

    measured: str
    #: samples/s of the recipe unchanged, of the best with the same bits, of the best of all
    default_rate: float
    preserving_rate: float
    best_rate: float
    preserving: dict[str, Any]
    best: dict[str, Any]


def recall(recipe: Recipe, device: torch.device) -> Outcome | None:
    """Return what was measured for this training on this machine; None if nothing, or the file cannot be read."""
    try:
        record = json.loads(_file(recipe, device).read_bytes())
        if record.pop("format") != FORMAT:
            return None
        return Outcome(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it can be measured again


def remember(recipe: Recipe, device: torch.device, found: Outcome) -> Path:
    """Save the outcome; return the file."""
    path = _file(recipe, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {error.strerror}") from None
    write_json(path, {"format": FORMAT, **asdict(found)})
    return path


def _file(recipe: Recipe, device: torch.device) -> Path:
    tree = recipe.tree()
    # Everything that the speed depends on; not the length of the training, where to save, or the seed.
    shape = {name: tree[name] for name in ("workload", "batch", "parallel")} | {"optimiser": recipe.optim.name}
    shape["workload"] = {**tree["workload"], "name": identity(recipe.workload.name)}
    shape["engine"] = {key: tree["engine"][key] for key in ("threads", "layout", "compile", "reduction")}
    machine = {
        "processor": processor.name(),
        "num_cores": len(usable_cores()),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "device": _device_name(device),
        "torch": torch.__version__,
        "podium": __version__,
    }
    text = json.dumps([machine, shape], sort_keys=True)
    name = short_name(recipe.workload.name).replace(":", "-")
    return cache_folder("tune", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")


def _device_name(device: torch.device) -> str:
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)
