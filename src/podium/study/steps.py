"""What a study does next: pure, from its definition and the records of its runs, never from who was ready first.

Without a target, halving or tpe, everything may start at once. Otherwise choices of values (points) come in generations
of a fixed size: all of one are settled before the next begins, and are compared in the order of their numbers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.recipe.durations import Duration
from podium.study.definition import StudySection
from podium.study.records import Records, RunRecord, by_point, mean, point_value


@dataclass(frozen=True)
class Task:
    """A run to be trained, to its end or until it is compared with others."""

    number: int
    until: Duration | None = None
    #: how many comparisons it has passed when it gets there
    rung: int | None = None


@dataclass(frozen=True)
class Steps:
    """What may be done now; nothing of it: the study is complete."""

    tasks: list[Task] = field(default_factory=list)
    #: runs that are not worth more training
    prune: list[int] = field(default_factory=list)
    #: points whose values are to be suggested, of one generation
    suggest: list[int] = field(default_factory=list)
    #: the point that has reached the target
    reached: int | None = None

    @property
    def complete(self) -> bool:
        return not (self.tasks or self.prune or self.suggest)


def next_steps(study: StudySection, records: Records) -> Steps:
    """Return what may be done now."""
    points = by_point(records.values())
    if not study.by_generations:
        missing = [point for point in range(study.num_points) if point not in points]
        return Steps([Task(run.number) for run in records.values() if not run.settled], suggest=missing)
    for generation in generations(study):
        missing = [point for point in generation if point not in points]
        if missing:
            return Steps(suggest=missing)
        steps = _steps_of(study, [points[point] for point in generation])
        if not steps.complete:
            return steps
        values = {point: value for point in generation if (value := _feasible_value(points[point])) is not None}
        reached = next((point for point, value in values.items() if study.reaches_target(value)), None)
        if reached is not None:
            return Steps(reached=reached)
    return Steps()


def generations(study: StudySection) -> Iterator[range]:
    """Yield the points of each generation."""
    for first in range(0, study.num_points, study.generation):
        yield range(first, min(first + study.generation, study.num_points))


def _steps_of(study: StudySection, points: Sequence[Sequence[RunRecord]]) -> Steps:
    """Return what is left to do in one generation."""
    if study.halving is None:
        return Steps([Task(run.number) for runs in points for run in runs if not run.settled])
    contenders = [runs for runs in points if not any(run.state == "failed" for run in runs)]
    prune = [run.number for runs in points if runs not in contenders for run in runs if not run.settled]
    rung = 0
    while contenders:
        going = [runs for runs in contenders if not all(run.state == "finished" for run in runs)]
        open_runs = [run for runs in going for run in runs if run.state != "finished" and len(run.rungs) <= rung]
        if open_runs:
            until = study.halving.rung(rung)
            return Steps([Task(run.number, until, rung + 1) for run in open_runs if run.state != "pruned"], prune)
        kept = promoted(study, [_rung_value(runs, rung) for runs in going])
        prune += [
            run.number for runs, keep in zip(going, kept, strict=True) if not keep for run in runs if not run.settled
        ]
        contenders = [runs for runs, keep in zip(going, kept, strict=True) if keep]
        rung += 1
    return Steps(prune=prune)


def promoted(study: StudySection, values: Sequence[float]) -> list[bool]:
    """Return which of the values that are compared go on: the best 1 / factor of them, one at least, ties included.

    Optuna's pruner has the same rule, but compares with whoever has come as far at that moment: its outcome depends on
    who is faster.
    """
    if not values:
        return []
    assert study.halving is not None
    ranked = sorted(values, reverse=not study.less_is_better)
    threshold = ranked[max(0, len(values) // study.halving.factor - 1)]
    return [not study.better(threshold, value) for value in values]


def _rung_value(runs: Sequence[RunRecord], rung: int) -> float:
    """Return the mean over seeds where they are compared; of one that has finished before that, its result."""
    values = [run.rungs[rung] if len(run.rungs) > rung else run.value for run in runs]
    return mean(value for value in values if value is not None)


def _feasible_value(runs: Sequence[RunRecord]) -> float | None:
    return point_value(runs) if all(run.feasible for run in runs) else None


# --- numbering --------------------------------------------------------------------------------------------------------


def new_points(study: StudySection, records: Records) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the points of a grid that have no records yet, with their values.

    Those that exist keep their numbers, and others follow in the order of the grid: a grid may grow.
    """
    known = {_identity(run.values): run.point for run in records.values()}
    following = max(known.values(), default=-1) + 1
    found = [values for values in study.grid() if _identity(values) not in known]
    return [(following + index, values) for index, values in enumerate(found[: study.num_points - len(known)])]


def new_runs(
    study: StudySection, records: Records, points: Sequence[tuple[int, Mapping[str, Any]]], first_seed: int
) -> list[RunRecord]:
    """Return the records of runs that these points, and those that exist, still lack; numbers go on from the last."""
    wanted = {point: dict(runs[0].values) for point, runs in by_point(records.values()).items()}
    wanted |= {point: dict(values) for point, values in points}
    known = {(run.point, run.seed) for run in records.values()}
    number = max(records, default=-1) + 1
    found = []
    for point, values in sorted(wanted.items()):
        seeds = [values["seed"]] if "seed" in values else study.run_seeds(first_seed)
        for seed in seeds:
            if (point, seed) not in known:
                found.append(RunRecord(number=number, point=point, state="waiting", values=values, seed=seed))
                number += 1
    return found


def _identity(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def best_point(study: StudySection, records: Records) -> int | None:
    """Return the point with the best value that keeps to the constraints; of equal ones, the first."""
    best: tuple[float, int] | None = None
    for point, runs in by_point(records.values()).items():
        value = _feasible_value(runs)
        if value is not None and (best is None or study.better(value, best[0])):
            best = value, point
    return None if best is None else best[1]
