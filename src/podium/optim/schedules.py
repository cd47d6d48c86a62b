"""Learning rates over a training. Owns the `schedule` section; `train.py` builds one and asks for every update's rate.

The rate of update number u (from 0) of `total` updates, with a warm-up of W updates and t = u - W, T = total - W:

    u < W          base_lr · (u + 1) / W            reaches base_lr in the last update of the warm-up
    constant       base_lr
    stepped        base_lr · factors[i]             i = the last point of `at` with u >= at[i]; counted from update 0
    cosine         base_lr · (final + (1 - final) · (1 + cos(π t / T)) / 2)
    linear         base_lr · (final + (1 - final) · (1 - t / T))
    polynomial     base_lr · (final + (1 - final) · (1 - t / T) ** power)
    exponential    base_lr · rate ** (t / every)    with `staircase`, t / every is rounded down
    plateau        base_lr · factor ** reductions   one reduction after more than `patience` validations in a row
                                                    without improvement; at least min_lr

So each starts at base_lr right after the warm-up, and those with an end would reach it in the update after the last.
All but plateau are functions of u alone; plateau also remembers what it observed, which is saved in checkpoints.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from podium.durations import Duration
from podium.errors import UserError
from podium.schema import Section

Positive = Annotated[float, Field(gt=0)]
Part = Annotated[float, Field(ge=0, le=1)]

#: the keys of each schedule with what they are when left out; None: must be given
_KEYS: dict[str, dict[str, Any]] = {
    "constant": {},
    "stepped": {"at": None, "factor": 0.1},
    "cosine": {"final": 0.0},
    "linear": {"final": 0.0},
    "polynomial": {"final": 0.0, "power": 1.0},
    "exponential": {"rate": None, "every": Duration(1, "ep"), "staircase": False},
    "plateau": {"patience": 8, "factor": 0.11, "cooldown": 2, "threshold": 1e-4, "min_lr": 0.0},
}


class ScheduleSection(Section):
    """`schedule`: how the learning rate changes. Keys of other schedules than the named one stay null."""

    name: Literal["constant", "stepped", "cosine", "linear", "polynomial", "exponential", "plateau"] = "constant"
    warmup: Duration = Field(Duration(0, "up"), description="linear rise to the full learning rate at the start")
    at: list[Duration] | None = Field(None, description="stepped: when the rate changes, from the start of training")
    factor: Positive | list[Positive] | None = Field(
        None,
        description="stepped: multiplies the rate at every point of `at` (0.1), or a list with the part of the full "
        "rate from each point on; plateau: multiplies the rate at every reduction (0.11)",
    )
    final: Part | None = Field(None, description="cosine, linear, polynomial: part of the rate left at the end (0)")
    power: Positive | None = Field(None, description="polynomial: exponent (1)")
    rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="exponential: what is left after each `every`"
    )
    every: Duration | None = Field(None, description="exponential: how long it takes to decay by `rate` (1ep)")
    staircase: bool | None = Field(None, description="exponential: decay in steps of `every` (false)")
    patience: int | None = Field(None, ge=0, description="plateau: validations without improvement to bear with (8)")
    cooldown: int | None = Field(None, ge=0, description="plateau: validations not counted after a reduction (2)")
    threshold: float | None = Field(
        None, ge=0, lt=1, description="plateau: smallest improvement that counts, as part of the best loss (1e-4)"
    )
    min_lr: float | None = Field(None, ge=0, description="plateau: the rate is not reduced below this (0)")

    @model_validator(mode="after")
    def _keys_fit_the_schedule(self) -> Self:
        own = _KEYS[self.name]
        for key in dict.fromkeys(key for keys in _KEYS.values() for key in keys):
            given = getattr(self, key) is not None
            if given and key not in own:
                raise ValueError(f"{key} means nothing to the {self.name} schedule: leave it out or set it to null")
            if not given and key in own and own[key] is None:
                raise ValueError(f"the {self.name} schedule needs {key}")
        if isinstance(self.factor, list):
            if self.name == "plateau":
                raise ValueError("the plateau schedule takes one factor, not a list")
            if len(self.factor) != len(self.at or []):
                raise ValueError(f"factor has {len(self.factor)} values for {len(self.at or [])} points in at")
        if self.name == "plateau" and isinstance(self.factor, float) and self.factor >= 1:
            raise ValueError("the factor of the plateau schedule must be below 1")
        if self.every is not None and not self.every:
            raise ValueError("every must be longer than 0")
        return self

    def value(self, key: str) -> Any:
        """The key as given, or its default for the named schedule."""
        given = getattr(self, key)
        return _KEYS[self.name][key] if given is None else given


class Plateau:
    """How often the rate was reduced, and the memory that decides when to reduce again."""

    def __init__(self, *, factor: float, patience: int, cooldown: int, threshold: float) -> None:
        self._factor, self._patience, self._cooldown, self._threshold = factor, patience, cooldown, threshold
        self._best = math.inf
        self._num_bad = 0
        self._num_cooling = 0
        self.num_reductions = 0

    def scale(self) -> float:
        return self._factor**self.num_reductions

    def observe(self, loss: float, counts: bool) -> None:
        """Take in a validation loss; one that is not finite is no improvement."""
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
    """The learning rate of every update; see the module's text for the formulas."""

    def __init__(
        self,
        base_lr: float,
        warmup_updates: int,
        shape: Callable[[int], float],
        plateau: Plateau | None = None,
        min_lr: float = 0.0,
    ) -> None:
        self.base_lr = base_lr
        self.warmup_updates = warmup_updates
        self._shape = shape  # update number, from the end of the warm-up on -> part of base_lr
        self._plateau = plateau
        self._min_lr = min_lr

    @property
    def observes_validation(self) -> bool:
        """Whether `observe` must be called after every validation."""
        return self._plateau is not None

    def lr(self, update: int) -> float:
        """The rate that update number `update` (from 0) is made with."""
        if update < self.warmup_updates:
            return self.base_lr * ((update + 1) / self.warmup_updates)
        return max(self.base_lr * self._shape(update), self._min_lr)

    def observe(self, valid_loss: float, update: int) -> None:
        """Tell the validation loss after `update` updates. During the warm-up only the best loss is remembered."""
        if self._plateau is not None:
            self._plateau.observe(valid_loss, counts=update >= self.warmup_updates)

    def state(self) -> dict[str, float | int | None]:
        """What cannot be computed from the update number; plain JSON."""
        return {} if self._plateau is None else self._plateau.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state()` was taken."""
        if self._plateau is not None:
            self._plateau.load(state)


def build_schedule(
    section: ScheduleSection, base_lr: float, total_updates: int, updates_per_epoch: int, global_batch: int
) -> Schedule:
    """The schedule of a training of `total_updates`, with all durations turned into updates."""

    def updates(duration: Duration) -> int:
        return duration.updates(
            updates_per_epoch=updates_per_epoch, global_batch=global_batch, total_updates=total_updates
        )

    warmup = updates(section.warmup)
    if warmup > total_updates:
        raise UserError(
            f"schedule.warmup={section.warmup} is {warmup} updates, longer than the training of {total_updates}"
        )
    if section.name == "plateau":
        plateau = Plateau(**{key: section.value(key) for key in ("factor", "patience", "cooldown", "threshold")})
        min_lr = section.value("min_lr")
        if min_lr > base_lr:
            raise UserError(f"schedule.min_lr={min_lr:g} is above the learning rate of {base_lr:g}")
        return Schedule(base_lr, warmup, lambda update: plateau.scale(), plateau, min_lr)
    if section.name == "stepped":
        return Schedule(base_lr, warmup, _stepped(section, [updates(point) for point in section.value("at")], warmup))
    if section.name == "exponential":
        rate, every, staircase = section.value("rate"), updates(section.value("every")), section.value("staircase")
        if staircase:
            return Schedule(base_lr, warmup, lambda update: rate ** ((update - warmup) // every))
        return Schedule(base_lr, warmup, lambda update: rate ** ((update - warmup) / every))
    if section.name == "constant":
        return Schedule(base_lr, warmup, lambda update: 1.0)
    return Schedule(base_lr, warmup, _ending(section, warmup, total_updates))


def _stepped(section: ScheduleSection, points: list[int], warmup: int) -> Callable[[int], float]:
    if any(second <= first for first, second in pairwise(points)):
        raise UserError(f"schedule.at must rise from point to point, but is {points} in updates")
    if points and points[0] < warmup:
        raise UserError(f"schedule.at begins at update {points[0]}, inside the warm-up of {warmup} updates")
    factor = section.value("factor")
    after = factor if isinstance(factor, list) else [factor ** (i + 1) for i in range(len(points))]
    parts = [1.0, *after]
    return lambda update: parts[bisect_right(points, update)]


def _ending(section: ScheduleSection, warmup: int, total_updates: int) -> Callable[[int], float]:
    """Shapes that run from 1 down to `final` over what the warm-up leaves of the training."""
    final = section.value("final")
    power = section.value("power") if section.name == "polynomial" else 1.0
    length = max(total_updates - warmup, 1)

    def cosine(update: int) -> float:
        done = min((update - warmup) / length, 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    def polynomial(update: int) -> float:
        done = min((update - warmup) / length, 1.0)
        return final + (1 - final) * (1 - done) ** power

    return cosine if section.name == "cosine" else polynomial
