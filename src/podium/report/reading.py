"""What a report reads of a run: its summary, recipe, environment and records. Loads no torch and runs no code of a run.

Everything comes from files that anybody may have written: `runs/facts.py` checks them, and text is made visible here.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.errors import UserError
from podium.recipe.differences import leaves
from podium.runs.facts import iterate_records
from podium.runs.folder import Run, open_run
from podium.ui.visible import visible

Column = NDArray[np.float64]

_MAX_RECORDS = 1_000_000
#: of a folder that is searched for runs
_MAX_DEPTH, _MAX_RUNS = 6, 20_000
#: what is searched for nothing: parts of runs and studies that are no runs
_NOT_RUNS = ("checkpoints", "tensorboard", "pictures", "log", "earlier", "recipes")


@dataclass(frozen=True)
class RunFacts:
    """One run, read once."""

    run: Run
    #: short, and different from that of any other run of the report
    name: str
    state: str
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    #: the resolved recipe by dotted key
    recipe: Mapping[str, Any] = field(repr=False)
    #: the metric records, by name one number for each record, NaN where it has none
    columns: Mapping[str, Column] = field(repr=False)

    @property
    def num_records(self) -> int:
        return len(self.columns.get("update", ()))

    @property
    def metrics(self) -> list[str]:
        """The names of all that it has recorded."""
        return [name for name in self.columns if "/" in name]

    @property
    def device(self) -> str:
        """What the run is computed on: cpu, cuda."""
        return str(self.environment.get("device", "cpu")).partition(":")[0]

    @property
    def num_devices(self) -> int:
        """How many cores it has at its disposal, or other devices: of each instance one, or its threads."""
        instances = int((self.summary.get("topology") or {}).get("instances", 1))
        return instances * (int(self.environment.get("threads_per_replica") or 1) if self.device == "cpu" else 1)

    def count(self, key: str) -> int:
        """Return a number of the recipe that counts something, 1 where it has none."""
        value = self.recipe.get(key)
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def device_name(self) -> str:
        """What devices are called where they are counted."""
        return "core" if self.device == "cpu" else "device"

    @property
    def seconds(self) -> float | None:
        """How long it has taken so far."""
        total = (self.summary.get("seconds") or {}).get("total")
        return None if total is None else float(total)

    @property
    def rate(self) -> float | None:
        """Samples per second of training."""
        rate = float(self.summary.get("samples_per_second") or 0.0)
        return rate if rate > 0 else None

    @property
    def started(self) -> datetime | None:
        """When it was started, as far as that is known."""
        text = self.environment.get("started")
        return datetime.fromisoformat(text).astimezone() if text else None

    @property
    def energy_j(self) -> float | None:
        """The energy of processors and accelerators, None where it was not measured."""
        energy = self.summary.get("energy")
        values = [energy.get(name) for name in ("processor_j", "accelerator_j")] if isinstance(energy, dict) else []
        known = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        return math.fsum(known) if known else None


def read_run(run: Run, name: str) -> RunFacts:
    """Read a run; raise UserError where its files are damaged."""
    columns = read_columns(run.metrics_file)
    return RunFacts(run, visible(name), run.state(), run.summary(), run.environment(), leaves(run.tree()), columns)


def read_columns(path: Path) -> dict[str, Column]:
    """Return the records of a run by name: thousands of runs fit into memory that way."""
    found: dict[str, array] = {}
    for count, record in enumerate(iterate_records(path)):
        for name, value in record.items():
            if name not in found:
                found[name] = array("d", [math.nan]) * count
            found[name].append(_as_float(value))
        for values in found.values():
            if len(values) <= count:
                values.append(math.nan)
        if count >= _MAX_RECORDS:
            raise UserError(f"{path} has more than {_MAX_RECORDS:,} records: move it away for now")
    return {visible(name): np.frombuffer(values) for name, values in found.items()}


def _as_float(value: Any) -> float:
    return float(value) if not isinstance(value, int) or abs(value) < 2**1000 else math.nan


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs of these folders: a run itself, or all runs below a study or any other folder."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: expected the folder of a run, of a study, or one with runs in it")
        below = [open_run(path)] if (path / "recipe.yaml").is_file() else sorted(_below(path), key=lambda one: one.path)
        if not below:
            raise UserError(f"{path} holds no runs")
        found |= {run.path.resolve(): run for run in below}
        if len(found) > _MAX_RUNS:
            raise UserError(f"these are more than {_MAX_RUNS:,} runs: name a folder with fewer of them")
    return list(found.values())


def _below(folder: Path, depth: int = _MAX_DEPTH) -> Iterator[Run]:
    try:
        children = [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
    except OSError:  # not ours to look at
        return
    for child in children:
        if child.name.startswith(".") or child.name in _NOT_RUNS:
            continue
        if (child / "recipe.yaml").is_file():
            yield Run(child)
        elif depth:
            yield from _below(child, depth - 1)


def read_runs(runs: Sequence[Run], warn: Callable[[str], None]) -> list[RunFacts]:
    """Read runs; those whose files are damaged are told and left out, unless none is left."""
    found, problems = [], []
    for run, name in zip(runs, names_of([run.path for run in runs]), strict=True):
        try:
            found.append(read_run(run, name))
        except UserError as error:
            problems.append(error)
    if problems and not found:
        raise problems[0]
    for problem in problems[:3]:
        warn(f"{problem}; left out")
    if len(problems) > 3:
        warn(f"{len(problems) - 3} more damaged runs are left out")
    return found


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that no other has."""
    full = [path.resolve().parts for path in paths]
    names = [""] * len(full)
    left = list(range(len(full)))
    for count in range(1, max(map(len, full), default=0) + 1):
        ends = {index: "/".join(full[index][-count:]) for index in left}
        taken: dict[str, int] = {}
        for end in ends.values():
            taken[end] = taken.get(end, 0) + 1
        for index in left:
            names[index] = ends[index]
        left = [index for index in left if taken[ends[index]] > 1]
        if not left:
            break
    return names


def metric_names(runs: Iterable[RunFacts]) -> list[str]:
    """Return the names of all that runs record, the loss of the validation first."""
    found = dict.fromkeys(name for facts in runs for name in facts.metrics)
    return sorted(found, key=lambda name: (_rank(name), name))


def _rank(name: str) -> int:
    if name.startswith("valid/average_"):
        return 3
    return 0 if name == "valid/loss" else 1 if name.startswith("valid/") else 2 if name == "train/loss" else 4


def values_of(facts: RunFacts, metric: str) -> list[tuple[int, float]]:
    """Return the finite values of a metric, each with the number of its record, in order."""
    column = facts.columns.get(metric)
    if column is None:
        return []
    return [(int(at), float(column[at])) for at in np.flatnonzero(np.isfinite(column))]
