"""A user's learning-rate schedule: a function (update, total updates) -> fraction of the full rate."""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from podium.errors import UserError


class OwnShape:
    """The fraction of the full learning rate at an update, from the end of the warm-up on, by a user's function."""

    def __init__(self, function: Any, name: str, total_updates: int) -> None:
        if not callable(function) or inspect.isclass(function):
            raise UserError(f"schedule.name = {name}: expected a function (update, total_updates) -> fraction")
        self._function: Callable[[int, int], Any] = function
        self._name, self._total = name, total_updates
        try:
            inspect.signature(function).bind(0, total_updates)
        except TypeError:
            raise UserError(
                f"schedule.name = {name}: the function must take two arguments, the update and the total number of "
                "updates"
            ) from None
        for update in sorted({0, total_updates // 2, total_updates - 1}):
            if self(update) != self(update):
                raise UserError(
                    f"schedule.name = {name}: update {update} has another rate when asked again: the function may "
                    "depend on nothing but its arguments"
                )

    def __call__(self, update: int) -> float:
        value: Any = self._function(update, self._total)
        is_number = isinstance(value, numbers.Real) and type(value) is not bool
        if not is_number or not 0 <= float(value) < math.inf:
            raise UserError(
                f"schedule.name = {self._name}: it returned {str(value)[:100]!r} for update {update}: expected a "
                "finite number, at least 0"
            )
        return float(value)
