"""The `schedule` section: how the learning rate changes. `optim/schedules.py` has the formulas."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from podium.recipe.durations import Duration
from podium.recipe.section import OwnName, Section, is_own_name

Positive = Annotated[float, Field(gt=0)]
Part = Annotated[float, Field(ge=0, le=1)]
#: the keys of each schedule with their defaults; None: required
_KEYS: dict[str, dict[str, Any]] = {
    "constant": {},
    "stepped": {"at": None, "factor": 0.1},
    "cosine": {"final": 0.0, "span": "rest"},
    "linear": {"final": 0.0, "span": "rest"},
    "polynomial": {"final": 0.0, "power": 1.0, "span": "rest"},
    "exponential": {"rate": None, "every": Duration(1, "ep"), "staircase": False, "span": "rest"},
    "plateau": {"patience": 8, "factor": 0.11, "cooldown": 2, "threshold": 1e-4, "min_lr": 0.0},
}
_ALL_KEYS = tuple(dict.fromkeys(key for keys in _KEYS.values() for key in keys))


class ScheduleSection(Section):
    """`schedule`: how the learning rate changes. Keys that belong to other schedules stay null."""

    name: Literal["constant", "stepped", "cosine", "linear", "polynomial", "exponential", "plateau"] | OwnName = (
        "constant"
    )
    warmup: Duration = Field(Duration(0, "up"), description="linear rise to the full learning rate at the start")
    warmup_step: Duration = Field(
        Duration(0, "up"), description="the rise goes in steps of this length; 0: every update"
    )
    at: list[Duration] | None = Field(None, description="stepped: when the rate changes, from the start of training")
    factor: Positive | list[Positive] | None = Field(
        None,
        description="stepped: multiplies the rate at every point of `at` (0.1), or a list with the fraction of the "
        "full rate that applies from each point; plateau: multiplies the rate at every reduction (0.11)",
    )
    final: Part | None = Field(None, description="cosine, linear, polynomial: fraction of the rate left at the end (0)")
    span: Literal["all", "rest"] | None = Field(
        None,
        description="cosine, linear, polynomial, exponential: the updates over which the rate falls; all of them, with "
        "those of the warm-up counted in, or the rest after the warm-up (rest)",
    )
    power: Positive | None = Field(None, description="polynomial: exponent (1)")
    rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="exponential: fraction of the rate left after each `every`"
    )
    every: Duration | None = Field(None, description="exponential: how long it takes to decay by `rate` (1ep)")
    staircase: bool | None = Field(None, description="exponential: decay in steps of `every` (false)")
    patience: int | None = Field(None, ge=0, description="plateau: validations without improvement to tolerate (8)")
    cooldown: int | None = Field(None, ge=0, description="plateau: validations not counted after a reduction (2)")
    threshold: float | None = Field(
        None, ge=0, lt=1, description="plateau: smallest improvement that counts, as a fraction of the best loss (1e-4)"
    )
    min_lr: float | None = Field(None, ge=0, description="plateau: the rate is not reduced below this (0)")

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
        """Return the inherited keys that do not apply to another schedule, or have another meaning there."""
        name = written.get("name")
        if not isinstance(name, str) or name == inherited.get("name") or not (name in _KEYS or is_own_name(name)):
            return []
        return [key for key in _ALL_KEYS if key not in _KEYS.get(name, {}) or key == "factor"]

    @model_validator(mode="after")
    def _keys_fit_the_schedule(self) -> Self:
        own = _KEYS.get(self.name, {})  # a function of your own has no keys
        for key in _ALL_KEYS:
            given = getattr(self, key) is not None
            if given and key not in own:
                raise ValueError(
                    f"schedule.{key} does not apply to the {self.name} schedule: leave it out or set it to null"
                )
            if not given and key in own and own[key] is None:
                raise ValueError(f"schedule.{key} is missing: the {self.name} schedule needs it")
        if isinstance(self.factor, list):
            if self.name == "plateau":
                raise ValueError(f"schedule.factor = {self.factor}: expected one number with the plateau schedule")
            if len(self.factor) != len(self.at or []):
                raise ValueError(
                    f"schedule.factor = {self.factor}: expected one value for each of the {len(self.at or [])} points "
                    "of schedule.at"
                )
        if self.name == "plateau" and isinstance(self.factor, float) and self.factor >= 1:
            raise ValueError(f"schedule.factor = {self.factor:g}: expected a number below 1 with the plateau schedule")
        if self.every is not None and not self.every:
            raise ValueError(f"schedule.every = {self.every}: expected a duration longer than 0")
        return self

    def value(self, key: str) -> Any:
        """Return the key as given, or its default for the named schedule."""
        given = getattr(self, key)
        return _KEYS[self.name][key] if given is None else given
