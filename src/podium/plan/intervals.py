"""A value with the range that is expected to hold it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: an interval holds this share of what may happen
COVERAGE = 0.9


@dataclass(frozen=True)
class Interval:
    """A value with the range that is expected to hold it in nine cases of ten."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: NDArray[np.float64]) -> "Interval":
        """Return the median of draws, and the range of the middle ones."""
        low, value, high = np.quantile(draws, [(1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2])
        return cls(float(value), float(low), float(high))

    @classmethod
    def read(cls, values: Sequence[float]) -> "Interval":
        """Return the interval of a list of three numbers, as `listed` writes it; raise ValueError for anything else."""
        value, low, high = (float(part) for part in values)
        return cls(value, low, high)

    def listed(self) -> list[float]:
        return [self.value, self.low, self.high]

    def __contains__(self, measured: float) -> bool:
        return self.low <= measured <= self.high

    def mapped(self, by: Callable[[float], float]) -> "Interval":
        """Return the interval of a monotonic function of the value."""
        low, high = sorted((by(self.low), by(self.high)))
        return Interval(by(self.value), low, high)
