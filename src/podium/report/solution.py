"""Time to solution: when each run reached a target, what it took, and how many replicas and samples to train with.

A target counts as reached at the first record that is at least as good. Nothing is interpolated, and nothing is said of
runs that did not get there except how close they came.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from podium.errors import UserError
from podium.recipe.differences import written
from podium.report.reading import RunFacts, metric_names, values_of
from podium.ui.console import clock_text, number

#: how names of metrics end of which less, or more, is better
_LESS = ("loss", "perplexity", "error", "mae", "mse", "rmse", "wer", "nll", "bits_per_byte")
_MORE = ("accuracy", "top1", "top5", "precision", "recall", "f1", "auc", "r2", "iou", "dice", "bleu", "score")
#: a single run is as fast as another within this
_ALIKE = 1.05


@dataclass(frozen=True)
class Target:
    """A value of a metric that a run should reach."""

    metric: str
    value: float
    less_is_better: bool = True

    def reached(self, value: float) -> bool:
        return value <= self.value if self.less_is_better else value >= self.value

    def better(self, value: float, than: float) -> bool:
        return value < than if self.less_is_better else value > than

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.less_is_better else '≥'} {number(self.value)}"


@dataclass(frozen=True)
class Solution:
    """How one run came to the target; without `update`: it did not. Without `seconds`: its records have no times."""

    facts: RunFacts
    best: float | None
    update: int | None = None
    samples: float | None = None
    seconds: float | None = None
    #: of processors and accelerators until then; None: unknown
    energy_j: float | None = None

    @property
    def device_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.facts.num_devices / 3600


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    values: Mapping[str, Any]
    solutions: list[Solution]

    @property
    def replicas(self) -> int:
        return self.solutions[0].facts.count("batch.replicas")

    @property
    def global_batch(self) -> int:
        facts = self.solutions[0].facts
        return facts.count("batch.micro") * facts.count("batch.accumulation") * self.replicas

    @property
    def reached(self) -> list[Solution]:
        return [solution for solution in self.solutions if solution.update is not None]

    @property
    def complete(self) -> bool:
        """Return whether every seed has reached the target."""
        return len(self.reached) == len(self.solutions)

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Return median, least and most of a fact over the seeds that have reached the target, None where unknown."""
        values = [getattr(solution, name) for solution in self.reached]
        known = [value for value in values if value is not None]
        return (statistics.median(known), min(known), max(known)) if known and len(known) == len(values) else None


def less_is_better(metric: str, runs: Sequence[RunFacts] = ()) -> bool:
    """Return whether less of a metric is better; raise UserError where its name and the recipes do not tell."""
    for facts in runs:
        if facts.recipe.get("checkpoint.best.metric") == metric:
            return facts.recipe.get("checkpoint.best.mode", "min") != "max"
    name = metric.rpartition("/")[2].lower()
    if name.endswith(_LESS):
        return True
    if name.endswith(_MORE):
        return False
    raise UserError(f"is less or more of {metric} better? say so with `{metric}<=VALUE` or `{metric}>=VALUE`")


def parse_target(text: str, runs: Sequence[RunFacts]) -> Target:
    """Return the target of `valid/loss=0.05`, `valid/loss<=0.05` or `valid/accuracy>=0.9`."""
    found = re.fullmatch(r"\s*([^=<>\s]+?)\s*(<=|>=|<|>|=)\s*(\S+)\s*", text)
    try:
        value = float(found[3]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not math.isfinite(value):
        raise UserError(f"--target {text[:80]}: expected a metric and a value, such as valid/loss=0.05")
    metric, sign = found[1], found[2]
    known = metric_names(runs)
    if metric not in known:
        raise UserError(
            f"--target {metric[:80]}: these runs do not record it; choose one of "
            f"{', '.join(name for name in known if name.startswith(('valid/', 'train/'))) or 'none'}"
        )
    return Target(metric, value, sign[0] == "<" if sign != "=" else less_is_better(metric, runs))


def solve(facts: RunFacts, target: Target) -> Solution:
    """Return when a run reached the target."""
    found = values_of(facts, target.metric)
    values = [value for _, value in found]
    best = (min(values) if target.less_is_better else max(values)) if values else None
    for at, value in found:
        if target.reached(value):
            update, seconds = int(facts.columns["update"][at]), _at(facts, "time/total_s", at)
            return Solution(facts, best, update, _at(facts, "samples", at), seconds, _energy_until(facts, at))
    return Solution(facts, best)


def _at(facts: RunFacts, name: str, at: int) -> float | None:
    value = float(facts.columns[name][at]) if name in facts.columns else math.nan
    return value if math.isfinite(value) else None


def _energy_until(facts: RunFacts, at: int) -> float | None:
    """Return the joules recorded up to a record; None unless one host measured all of them without a break."""
    if facts.energy_j is None or (facts.summary.get("topology") or {}).get("hosts", 1) != 1:
        return None
    found = []
    for name in ("system/energy_j", "system/accelerator_energy_j"):
        known = values_of(facts, name)
        if not known:
            continue
        if any(after < before for (_, before), (_, after) in pairwise(known)):
            return None  # counted anew after a resume
        until = [value for place, value in known if place <= at]
        if not until:
            return None
        found.append(until[-1])
    return math.fsum(found) if found else None


def groups_of(solutions: Sequence[Solution], keys: Sequence[str]) -> list[Group]:
    """Return runs that differ in none of these keys beside their seed, nor in their instances, as groups."""
    found: dict[str, Group] = {}
    for solution in solutions:
        values = {key: solution.facts.recipe.get(key) for key in keys if key != "seed"}
        topology = solution.facts.summary.get("topology") or {}
        identity = written([list(values.values()), solution.facts.num_devices, topology.get("hosts", 1)])
        found.setdefault(identity, Group(values, [])).solutions.append(solution)
    return list(found.values())


def recommendation(groups: Sequence[Group], target: Target) -> str:
    """Return how many replicas and samples to train with and why, or that nothing has reached the target."""
    complete = [group for group in groups if group.complete]
    if not complete:
        return _not_reached(groups, target)
    complete = [group for group in complete if group.spread("seconds") is not None]
    if not complete:
        return "reached, but the records of these runs do not say when: no choice can be recommended"
    fastest = min(complete, key=lambda group: _time(group)[0])
    alike = [group for group in complete if _overlap(_time(group), _time(fastest))]
    chosen = min(alike, key=lambda group: (_cost(group), _time(group)[0]))
    device = chosen.solutions[0].facts.device_name
    sentence = (
        f"{_counted(chosen.replicas, 'replica')} with a global batch of {chosen.global_batch:,}"
        f"{_others(chosen)}: {target} in {_interval(_time(chosen))}, {number(_cost(chosen))} {device}-hours"
    )
    if len(groups) == 1:
        return f"{sentence}; nothing else was tried"
    tied = [group for group in alike if group is not chosen]
    if tied:
        other = min(tied, key=lambda group: _time(group)[0])
        return (
            f"{sentence}. {_counted(other.replicas, 'replica')} with {other.global_batch:,}{_others(other)} took "
            f"{_interval(_time(other))}, which cannot be told apart from it, and {number(_cost(other))} {device}-hours"
        )
    rest = [group for group in complete if group is not chosen]
    if not rest:
        return f"{sentence}. No other choice reached it with every seed"
    cheapest = min(rest, key=_cost)
    second = min(rest, key=lambda group: _time(group)[0])
    sentence += f". It is the fastest, {_time(second)[0] / _time(chosen)[0]:.2f} times as fast as the next"
    if _cost(cheapest) < _cost(chosen):
        share = 1 - _cost(cheapest) / _cost(chosen)
        sentence += (
            f"; {_counted(cheapest.replicas, 'replica')} with {cheapest.global_batch:,}{_others(cheapest)} would save "
            f"{100 * share:.0f} % of the {device}-hours in {_interval(_time(cheapest))}"
        )
    return f"{sentence}{'' if _seeds(chosen) > 1 else '. One seed each: a difference of a few percent means nothing'}"


def _not_reached(groups: Sequence[Group], target: Target) -> str:
    partly = [group for group in groups if group.reached]
    if partly:
        best = max(partly, key=lambda group: len(group.reached) / len(group.solutions))
        return (
            f"not reached by every seed of any choice: at best by {len(best.reached)} of {len(best.solutions)} seeds, "
            f"with {_counted(best.replicas, 'replica')} and a global batch of {best.global_batch:,}{_others(best)}"
        )
    values = [solution.best for group in groups for solution in group.solutions if solution.best is not None]
    if not values:
        return f"not reached: no run has recorded {target.metric}"
    closest = min(values) if target.less_is_better else max(values)
    return f"not reached: no run came to {target}; the closest had {number(closest)}"


def _time(group: Group) -> tuple[float, float, float]:
    found = group.spread("seconds")
    assert found is not None
    return found


def _cost(group: Group) -> float:
    found = group.spread("device_hours")
    assert found is not None
    return found[0]


def _seeds(group: Group) -> int:
    return len(group.solutions)


def _overlap(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    return (one[1] <= other[2] and other[1] <= one[2]) or one[0] <= other[0] * _ALIKE


def _others(group: Group) -> str:
    """Return the values that belong to a choice beside its replicas and batch."""
    shown = {key: value for key, value in group.values.items() if not key.startswith("batch.")}
    return "".join(f", {key} {written(value)}" for key, value in list(shown.items())[:3])


def _interval(spread: tuple[float, float, float]) -> str:
    middle, least, most = (clock_text(one) if spread[0] >= 60 else f"{one:.2g} s" for one in spread)
    return middle if least == most else f"{middle} ({least} … {most})"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
