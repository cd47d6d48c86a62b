"""A metric that decides something: when a training stops (`train.stop`), which checkpoint is the best."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from podium.recipe.section import Section

_PREFIX = "valid/"


def _of_validation(name: str) -> str:
    if not name.startswith(_PREFIX) or name == _PREFIX:
        raise ValueError("expected a metric of the validation, such as valid/loss or valid/accuracy")
    return name


MetricName = Annotated[str, AfterValidator(_of_validation)]


class BestSection(Section):
    """Which validation is the best: the one with the least or the greatest value of a metric."""

    metric: MetricName = "valid/loss"
    mode: Literal["min", "max"] = "min"

    @property
    def name(self) -> str:
        """Return the name of the metric as validations report it."""
        return self.metric.removeprefix(_PREFIX)

    def better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better than the best one so far, by more than `by`."""
        if than is None:
            return value == value  # anything but NaN
        return value < than - by if self.mode == "min" else value > than + by


class StopSection(BestSection):
    """When to stop early: after `patience` validations in a row that do not improve a metric by more than
    `min_delta`."""

    patience: PositiveInt
    min_delta: Annotated[float, Field(ge=0)] = 0.0
