"""`podium check RECIPE`: answers for any model, the user's own too, what Podium promises for its own.

Same weights on several numbers of instances, after a kill, and cut into stages; sums and counts that add up; an update
that repeats and waits for nobody. Where bits differ, the first operator or module that gives other values is named.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.check.operators import Difference, Record, first_difference, record_replica
from podium.check.tails import tail_problem
from podium.check.trials import SIMPLER, Trial, Trials, first_differing_update, quick_overrides, trial_folder
from podium.distributed.lockstep import largest_span
from podium.errors import UserError
from podium.profiling.rates import measured_rates
from podium.recipe.loading import Recipe, load_recipe
from podium.topology import Blocks, possible_instances
from podium.training.build import Training, build_training
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

_COUNTS = (1, 2, 3, 4)
_NUM_REPLICAS, _NUM_UPDATES, _KILLED_AFTER = 4, 6, 2
_RATES_S = 0.5
Verdict = Literal["yes", "no", "note", "not tried"]


@dataclass(frozen=True)
class Answer:
    """One question about the recipe, and what was found."""

    question: str
    verdict: Verdict
    found: str = ""


def check(name: str, overrides: Sequence[str], keep: Path | None = None) -> bool:
    """Print a table of answers; return whether every promise holds. `keep`: a new folder for the trial runs."""
    if keep is not None and keep.exists():
        raise UserError(f"--keep {keep}: it already exists, choose another name")
    ours = _trial_overrides(load_recipe(name, overrides))
    training, simpler = _build(name, [*overrides, *ours])
    recipe, trained = training.recipe, [*overrides, *ours, *simpler]
    answers: list[Answer] = []
    total = 5 + len(_counts(recipe, largest_span(training.state.model))) + 2
    with console.progress_display(what="checking") as display, trial_folder(keep, "check") as folder:
        for done, answer in enumerate(_answers(name, trained, training, folder)):
            answers.append(answer)
            display.update(min(done + 1, total), total, {"checked": answer.question})
    good = all(answer.verdict != "no" for answer in answers)
    console.show_table(
        Table(
            f"{name} with {recipe.batch.num_replicas} replicas, {_NUM_UPDATES} updates each",
            ["promise", "kept", ""],
            [[answer.question, answer.verdict, answer.found] for answer in answers],
            ("every promise is kept" if good else "not every promise is kept")
            + (f"; checked with {' '.join(simpler)}, as the recipe's own schedule is longer" if simpler else ""),
        )
    )
    return good


def _trial_overrides(recipe: Recipe) -> list[str]:
    """Return what makes a recipe short, and lets several instances carry it."""
    short = quick_overrides(recipe, _NUM_UPDATES)
    if recipe.batch.num_replicas < _NUM_REPLICAS:
        short.append(f"batch.replicas={_NUM_REPLICAS}")
    if recipe.parallel.num_stages > 1:
        short.append("parallel.stages=1")
    return short


def _counts(recipe: Recipe, span: int) -> list[int]:
    """Return the numbers of instances to compare; `span`: how many replicas share statistics."""
    num_replicas, alike = recipe.batch.num_replicas, recipe.parallel.shard == "parameters"
    possible = possible_instances(num_replicas, blocks=Blocks(span, alike))
    return [count for count in _COUNTS if count in possible]


def _build(name: str, overrides: Sequence[str]) -> tuple[Training, list[str]]:
    """Return the training of the trials, and what simplifies its schedule where that does not fit so few updates."""
    try:
        return build_training(load_recipe(name, overrides), fresh=True), []
    except UserError as error:
        if not str(error).startswith("schedule.") or str(error).startswith("schedule.name"):  # a user's own is wrong
            raise
    return build_training(load_recipe(name, [*overrides, *SIMPLER]), fresh=True), SIMPLER


def _answers(name: str, overrides: Sequence[str], training: Training, folder: Path) -> Iterator[Answer]:
    recipe = training.recipe
    num_blocks = len(training.task.workload.stages(training.state.model))
    difference: Difference | None = None
    counts = _counts(recipe, span := largest_span(training.state.model))
    if span > 1:
        # These layers wait for each other's replicas, which run side by side.
        yield Answer("an update repeats", "not tried", "norm.span shares statistics between replicas")
    else:
        alone, again = record_replica(_plain(name, overrides), after_others=False, times=2)
        (after,) = record_replica(_plain(name, overrides), after_others=True)
        yield _finite(alone)
        difference = first_difference(alone, again)
        yield Answer("an update repeats", "no" if difference else "yes", difference.sentence() if difference else "")
        difference = first_difference(alone, after)
        yield Answer(
            "a replica does not depend on others",
            "no" if difference else "yes",
            difference.sentence() if difference else "",
        )
        waits = sorted(set(again.host_waits))
        yield Answer("no host wait in an update", "note" if waits else "yes", "; ".join(waits[:3]))
    problem = tail_problem(training)
    yield Answer("sums and counts add up", "no" if problem else "yes", problem)
    yield _speed(training)
    del training
    yield from _trainings(Trials(folder, name, overrides), recipe, counts, num_blocks, difference)


def _plain(name: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe uncompiled, as operators inside compiled code cannot be seen one by one."""
    return load_recipe(name, [*overrides, "engine.compile=false"])


def _equal(question: str, difference: Difference | None) -> Answer:
    return Answer(question, "no", difference.sentence()) if difference else Answer(question, "yes")


def _finite(record: Record) -> Answer:
    mean = record.loss / max(1, record.count)
    shown = f"loss {number(mean)} in the mean of {record.count:,}" if math.isfinite(mean) else f"the loss is {mean}"
    return Answer("the loss is finite", "yes" if math.isfinite(mean) else "no", shown)


def _speed(training: Training) -> Answer:
    rates = measured_rates(training, _RATES_S)
    took_ms = 1e3 * rates.global_batch / rates.both
    limits = {"input": "input", "compute": "compute"}.get(rates.bottleneck, "input and compute alike")
    return Answer("time of an update", "note", f"{number(took_ms)} ms on one instance; limited by {limits}")


def _trainings(
    trials: Trials, recipe: Recipe, counts: list[int], num_blocks: int, found: Difference | None
) -> Iterator[Answer]:
    first = trials.train(1)
    if first.problem:
        yield Answer("trains", "no", first.problem)
        return
    yield Answer("trains", "yes", f"weights {first.sha256[:16]}")
    for count in counts[1:]:
        yield _compared(f"same weights on {count} instances", first, trials.train(count), found)
    killed = trials.train_killed(1, counts[-1], _KILLED_AFTER)
    yield _compared(f"same weights after a kill, resumed on {counts[-1]}", first, killed, found)
    question = "same weights cut into 2 stages"
    if num_blocks < 2:
        yield Answer(question, "not tried", "the workload's stages() gives one block")
    elif recipe.engine.compile or recipe.engine.reduction == "fast" or recipe.parallel.shard != "none":
        yield Answer(
            question, "not tried", "stages need engine.compile=false, engine.reduction=exact, parallel.shard=none"
        )
    else:
        yield _compared(question, first, trials.train(2, "parallel.stages=2"), found)


def _compared(question: str, first: Trial, trial: Trial, found: Difference | None) -> Answer:
    if trial.problem:
        return Answer(question, "no", trial.problem)
    if trial.sha256 == first.sha256:
        return Answer(question, "yes")
    where = first_differing_update(first.run, trial.run)
    hint = "" if found else "; one process alone does not show the cause"
    return Answer(question, "no", f"{trial.sha256[:16]} differs, {where}{hint}" if where else "the weights differ")
