"""What an update is made of, as measured on this machine, and where that is remembered."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from podium import __version__
from podium.errors import UserError, system_reason
from podium.machine import processor
from podium.machine.cache_folder import cache_folder
from podium.recipe.loading import Recipe
from podium.runs.folder import write_json
from podium.topology import usable_cores
from podium.workloads.registry import identity, short_name

FORMAT = 4


@dataclass(frozen=True)
class HostTimes:
    """Updates with some number of instances on one host."""

    #: seconds of an update with one micro-batch for each instance: pass, reduction on the host, optimiser
    first_s: float
    #: seconds of each further micro-batch
    pass_s: float
    #: standard deviation of trainings, relative
    spread: float
    #: processor time of an instance for the same two
    busy_first_s: float
    busy_pass_s: float
    #: everything before the first update
    startup_s: float
    #: what the first updates take beyond that many others
    warm_up_s: float

    def seconds(self, num_passes: int) -> float:
        """Return the seconds of an update of so many micro-batches."""
        return self.first_s + (num_passes - 1) * self.pass_s

    @property
    def busy_once_s(self) -> float:
        """Return the processor time of an update beside its passes; below 0 where those after the first take longer."""
        return self.busy_first_s - self.busy_pass_s


@dataclass(frozen=True)
class Components:
    """The parts of a training of one recipe, measured on this machine."""

    measured: str
    num_cores: int
    #: per instance
    threads: int
    #: by the number of instances on the host
    times: Mapping[int, HostTimes]
    #: as many instances as the largest of `times`, on half of their cores; None where that was not asked for
    crowded: HostTimes | None
    #: standard deviation of single updates of one instance, relative
    jitter: float
    gradient_bytes: int
    #: one instance with one replica alone, from its start to the end; None where the system does not tell it
    memory_bytes: int | None
    #: of one sample; of one checkpoint, as long as it holds the training up
    valid_s: float
    save_s: float
    num_samples: int
    num_valid_samples: int


def recall(recipe: Recipe) -> Components | None:
    """Return what was measured of this recipe on this machine; None if nothing, or the file cannot be read."""
    try:
        record = json.loads(_file(recipe).read_bytes())
        if record.pop("format") != FORMAT:
            return None
        times = {int(count): HostTimes(**values) for count, values in record.pop("times").items()}
        crowded = record.pop("crowded")
        return Components(times=times, crowded=crowded and HostTimes(**crowded), **record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it can be measured again


def remember(recipe: Recipe, found: Components) -> Path:
    """Save what was measured; return the file."""
    path = _file(recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {system_reason(error)}") from None
    write_json(path, {"format": FORMAT, **asdict(found)})
    return path


#: keys whose values change results, and the time of nothing
_WITHOUT_COST = [
    *(("optim", key) for key in ("lr", "scale", "base_batch", "lr_exponent", "betas", "decay", "eps", "eeta")),
    ("valid", "every"),
    ("average", "decay"),
]


def _file(recipe: Recipe) -> Path:
    tree = recipe.tree()
    # Everything that the parts depend on: not how many replicas and micro-batches make an update, nor its rates.
    shape: dict[str, Any] = {name: dict(tree[name]) for name in ("parallel", "precision", "optim", "valid", "average")}
    for section, key in _WITHOUT_COST:
        shape[section].pop(key)
    shape["workload"] = {**tree["workload"], "name": identity(recipe.workload.name)}
    shape["engine"], shape["micro"] = tree["engine"], recipe.batch.micro_batch
    machine = {
        "processor": processor.name(),
        "num_cores": len(usable_cores()),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "podium": __version__,
    }
    text = json.dumps([machine, shape], sort_keys=True)
    name = short_name(recipe.workload.name).replace(":", "-")
    return cache_folder("plan", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")
