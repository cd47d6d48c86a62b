"""Learning-rate schedules; `train.py` builds one and asks for the rate of every update.

The rate of update number u (from 0) of `total` updates, with a warm-up of W updates:

    span: rest     t = u - W, T = total - W         the rate falls over what is left after the warm-up
    span: all      t = u, T = total                 it falls over all updates; the warm-up hides the beginning

    u < W          base_lr · (u + 1) / W            reaches base_lr in the last update of the warm-up
                                                    with steps of S updates: base_lr · min((⌊u / S⌋ + 1) · S / W, 1)
    constant       base_lr
    stepped        base_lr · factors[i]             i = the last point of `at` with u >= at[i]; counted from update 0
    cosine         base_lr · (final + (1 - final) · (1 + cos(π t / T)) / 2)
    linear         base_lr · (final + (1 - final) · (1 - t / T))
    polynomial     base_lr · (final + (1 - final) · (1 - t / T) ** power)
    exponential    base_lr · rate ** (t / every)    with `staircase`, t / every is rounded down
    plateau        base_lr · factor ** reductions   one reduction after more than `patience` validations in a row
                                                    without improvement; at least min_lr
    a user's own   base_lr · function(u, total)     its value has to be a finite number, at least 0

With `span: rest`, each starts at base_lr right after the warm-up. Those with a final value would reach it in the update
after the last.
All but plateau depend on u only; plateau also remembers the losses it observed, which checkpoints save.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from podium.errors import UserError
from podium.optim.own_schedule import OwnShape
from podium.recipe.durations import Duration
from podium.recipe.section import is_own_name
from podium.recipe.sections.schedule import ScheduleSection


class Plateau:
    """The number of reductions so far, and the history that decides on the next one."""

    def __init__(self, *, factor: float, patience: int, cooldown: int, threshold: float) -> None:
        self._factor, self._patience, self._cooldown, self._threshold = factor, patience, cooldown, threshold
        self._best = math.inf
        self._num_bad = 0
        self._num_cooling = 0
        self.num_reductions = 0

    def scale(self) -> float:
        return self._factor**self.num_reductions

    def observe(self, loss: float, counts: bool) -> None:
        """Record a validation loss; one that is not finite is no improvement."""
        bound = self._best if math.isinf(self._best) else self._best - self._threshold * abs(self._best)
        if loss < bound:
            self._best = loss
            self._num_bad = 0
        elif counts:
            self._num_bad += 1
        if self._num_cooling:
            self._num_cooling -= 1
            self._num_bad = 0
        if self._num_bad > self._patience:
            self.num_reductions += 1
            self._num_cooling = self._cooldown
            self._num_bad = 0

    def state(self) -> dict[str, float | int | None]:
        return {
            "best": None if math.isinf(self._best) else self._best,  # JSON has no infinity
            "num_bad": self._num_bad,
            "num_cooling": self._num_cooling,
            "num_reductions": self.num_reductions,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._best = math.inf if state["best"] is None else float(state["best"])
        self._num_bad = int(state["num_bad"])
        self._num_cooling = int(state["num_cooling"])
        self.num_reductions = int(state["num_reductions"])


class Schedule:
    """The learning rate of every update; the module's docstring has the formulas."""

    def __init__(
        self,
        base_lr: float,
        warmup_updates: int,
        shape: Callable[[int], float],
        plateau: Plateau | None = None,
        min_lr: float = 0.0,
        warmup_step: int = 1,
    ) -> None:
        self.base_lr = base_lr
        self.warmup_updates = warmup_updates
        self._warmup_step = warmup_step
        self._shape = shape  # update number, from the end of the warm-up on -> fraction of base_lr
        self._plateau = plateau
        self._min_lr = min_lr

    @property
    def observes_validation(self) -> bool:
        """Return whether `observe` must be called after every validation."""
        return self._plateau is not None

    def lr(self, update: int) -> float:
        """Return the rate of update number `update` (from 0)."""
        if update < self.warmup_updates:
            reached = (update // self._warmup_step + 1) * self._warmup_step
            return self.base_lr * min(reached / self.warmup_updates, 1.0)
        return max(self.base_lr * self._shape(update), self._min_lr)

    def observe(self, valid_loss: float, update: int) -> None:
        """Record the validation loss after `update` updates. During the warm-up only the best loss is kept."""
        if self._plateau is not None:
            self._plateau.observe(valid_loss, counts=update >= self.warmup_updates)

    def state(self) -> dict[str, float | int | None]:
        """Return what cannot be computed from the update number, as plain JSON."""
        return {} if self._plateau is None else self._plateau.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state()` was taken."""
        if self._plateau is not None:
            self._plateau.load(state)


def build_schedule(
    section: ScheduleSection,
    base_lr: float,
    total_updates: int,
    updates_per_epoch: int,
    global_batch: int,
    own_function: Any = None,
) -> Schedule:
    """Build the schedule of a training of `total_updates`, with all durations converted into updates. `own_function`:
    the user's, where `schedule.name` leads to one."""

    def updates(duration: Duration) -> int:
        return duration.updates(
            updates_per_epoch=updates_per_epoch, global_batch=global_batch, total_updates=total_updates
        )

    warmup = updates(section.warmup)
    if warmup > total_updates:
        raise UserError(
            f"schedule.warmup = {section.warmup}: expected at most the {total_updates} updates of the training, "
            f"not {warmup}"
        )
    build = partial(Schedule, base_lr, warmup, warmup_step=max(1, updates(section.warmup_step)))
    if is_own_name(section.name):
        return build(OwnShape(own_function, section.name, total_updates))
    if section.name == "plateau":
        plateau = Plateau(**{key: section.value(key) for key in ("factor", "patience", "cooldown", "threshold")})
        min_lr = section.value("min_lr")
        if min_lr > base_lr:
            raise UserError(f"schedule.min_lr = {min_lr:g}: expected at most the learning rate of {base_lr:g}")
        return build(lambda update: plateau.scale(), plateau, min_lr)
    if section.name == "stepped":
        return build(_stepped(section, [updates(point) for point in section.value("at")], warmup))
    if section.name == "constant":
        return build(lambda update: 1.0)
    start = 0 if section.value("span") == "all" else warmup
    if section.name == "exponential":
        rate, every, staircase = section.value("rate"), updates(section.value("every")), section.value("staircase")
        if staircase:
            return build(lambda update: rate ** ((update - start) // every))
        return build(lambda update: rate ** ((update - start) / every))
    return build(_ending(section, start, total_updates))


def _stepped(section: ScheduleSection, points: list[int], warmup: int) -> Callable[[int], float]:
    if any(second <= first for first, second in pairwise(points)):
        raise UserError(f"schedule.at: expected increasing points, but in updates they are {points}")
    if points and points[0] < warmup:
        raise UserError(f"schedule.at: expected points after the warm-up of {warmup} updates, not {points[0]}")
    factor = section.value("factor")
    after = factor if isinstance(factor, list) else [factor ** (i + 1) for i in range(len(points))]
    parts = [1.0, *after]
    return lambda update: parts[bisect_right(points, update)]


def _ending(section: ScheduleSection, start: int, total_updates: int) -> Callable[[int], float]:
    """Return the shapes that fall from 1 to `final` between update `start` and the end of the training."""
    final = section.value("final")
    power = section.value("power") if section.name == "polynomial" else 1.0
    length = max(total_updates - start, 1)

    def cosine(update: int) -> float:
        done = min((update - start) / length, 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    def polynomial(update: int) -> float:
        done = min((update - start) / length, 1.0)
        return final + (1 - final) * (1 - done) ** power

    return cosine if section.name == "cosine" else polynomial
