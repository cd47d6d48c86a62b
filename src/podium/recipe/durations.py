"""Durations within a training, as people write them: `10ep`, `500up`, `1e6sa`, `0.28of`, converted into updates.

Owns the `Duration` type. Any section may use it as a field; code that knows the batch and the length of the training
(`train.py`, the schedules) calls `updates(...)`.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from podium.errors import UserError

Unit = Literal["ep", "up", "sa", "of"]

EXPECTED = "expected a duration such as 10ep, 500up, 1e6sa or 0.28of"

_TEXT = re.compile(r"(?P<amount>(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)(?P<unit>ep|up|sa|of)", re.IGNORECASE)
_UNITS: dict[str, Unit] = {"ep": "ep", "up": "up", "sa": "sa", "of": "of"}


@dataclass(frozen=True)
class Duration:
    """An amount of epochs (`ep`), updates (`up`), samples (`sa`), or a fraction of the training (`of`).

    Updates and samples are whole; a fraction of the training is at most 1. In a recipe a bare `0` means none.
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amount) and self.amount >= 0):
            raise UserError(f"{self.amount} is not a duration: {EXPECTED}")
        if self.unit in ("up", "sa") and not float(self.amount).is_integer():
            raise UserError(f"updates and samples are whole numbers, so {self} is not a duration: {EXPECTED}")
        if self.unit == "of" and self.amount > 1:
            raise UserError(f"{self} is more than the whole training: expected a fraction between 0of and 1of")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the duration written as `text`; raise UserError if it is not one."""
        if text.strip() == "0":
            return cls(0, "up")
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise UserError(f"{text!r} is not a duration: {EXPECTED}")
        return cls(float(match["amount"]), _UNITS[match["unit"].lower()])

    def __str__(self) -> str:
        # repr of a float is the shortest text that reads back as the same number
        whole = float(self.amount).is_integer() and self.amount < 1e15
        return f"{int(self.amount) if whole else repr(float(self.amount))}{self.unit}"

    def __bool__(self) -> bool:
        return self.amount > 0

    def updates(self, *, updates_per_epoch: int, global_batch: int, total_updates: int | None = None) -> int:
        """Return the number of updates this lasts, rounded up to cover the whole duration.

        The amount counts as the decimal number that was written, not as the nearest binary one: `0.1ep` of 60 updates
        is 6. `total_updates` is the length of the training; None if not known yet (as for that length itself).
        """
        amount = Fraction(repr(float(self.amount)))
        if self.unit == "ep":
            return math.ceil(amount * updates_per_epoch)
        if self.unit == "sa":
            return math.ceil(amount / global_batch)
        if self.unit == "of":
            if total_updates is None:
                raise UserError(
                    f"{self} is a fraction of the training, whose length is not known here: use ep, up or sa"
                )
            return math.ceil(amount * total_updates)
        return int(amount)

    @classmethod
    def _read(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        # YAML and command lines give a bare 0 as a number; False is a number too, but a mistake
        if isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
            return cls(0, "up")
        if not isinstance(value, str):
            raise ValueError(EXPECTED)
        try:
            return cls.parse(value)
        except UserError as error:
            text = str(error)
            raise ValueError(EXPECTED if text.endswith(EXPECTED) else text) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._read,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )


_TIME_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(value: object) -> object:
    if isinstance(value, str) and value[-1:] in _TIME_UNITS_S:
        try:
            return float(value[:-1]) * _TIME_UNITS_S[value[-1]]
        except ValueError:
            pass
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError("expected a time such as 90s, 30m, 12h or 2d, or a number of seconds")


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
