"""What a run has come to: the value of the study's metric, at its end or at a comparison, and its constraints."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import UserError
from podium.recipe.durations import Duration
from podium.runs.facts import iterate_records
from podium.runs.folder import Run
from podium.study.definition import StudySection

_Record = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Values of the metric that a run has recorded."""

    best: float
    last: float

    def taken(self, study: StudySection) -> float:
        """Return the one that the study goes by."""
        return self.best if study.take == "best" else self.last


class MetricMissing(UserError):
    """The metric that a study decides by is not among those that its runs record."""


def read_outcome(study: StudySection, run: Run, until: Duration | None = None) -> Outcome:
    """Return what a run has recorded, up to a point of its training; raise where that is nothing."""
    last_update = None if until is None else updates_of(until, run)
    found: list[float] = []
    names: set[str] = set()
    for record in iterate_records(run.metrics_file):
        if last_update is not None and record["update"] > last_update:
            break
        names |= {name for name in record if "/" in name}
        value = record.get(study.metric)
        if value is not None and math.isfinite(value):
            found.append(float(value))
    if not found:
        raise missing_metric(study, names, until)
    best = min(found) if study.less_is_better else max(found)
    return Outcome(best, found[-1])


def missing_metric(study: StudySection, names: Iterable[str], until: Duration | None = None) -> MetricMissing:
    """Return the error for a metric that is not recorded; `names` are those that are."""
    if until is not None:
        return MetricMissing(
            f"{study.metric} is not recorded before {until}, where runs are compared: set valid.every to {until} or "
            "less, or halving.first to more"
        )
    known = ", ".join(
        sorted(
            name for name in names if "/" in name and not name.startswith(("time/", "device/", "system/", "topology/"))
        )
    )
    return MetricMissing(f"{study.metric} is not recorded by these runs: choose one of {known or 'none'}")


def updates_of(duration: Duration, run: Run) -> int:
    """Return how many updates a duration lasts in a run that has made some."""
    first = next(iterate_records(run.metrics_file), None)
    if first is None or not first["update"] or not first.get("epoch"):
        raise UserError(f"{run.path} has no records of updates: its metrics.jsonl is damaged or gone")
    update = first["update"]
    return duration.updates(
        updates_per_epoch=round(update / first["epoch"]),
        global_batch=round(first["samples"] / update),
        total_updates=run.summary().get("total_updates"),
    )


def read_constraints(study: StudySection, run: Run) -> dict[str, float]:
    """Return by how much a run is on the wrong side of each constraint, by metric; 0 or less: it keeps to it."""
    if not study.constraints:
        return {}
    facts = _numbers(run.summary())
    for record in iterate_records(run.metrics_file):
        facts |= {name: float(value) for name, value in record.items() if "/" in name and math.isfinite(value)}
    found = {}
    for constraint in study.constraints:
        if constraint.metric not in facts:
            raise MetricMissing(
                f"constraints: {constraint.metric} is neither recorded by these runs nor a number of their summary"
            )
        found[constraint.metric] = constraint.violation(facts[constraint.metric])
    return found


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a summary by dotted name: `num_parameters`, `seconds.total`."""
    found: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{key}"] = float(value)
    return found
