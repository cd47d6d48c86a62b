"""Times that someone measured on a cluster, read from a small CSV file: devices against seconds or samples/s.

    devices,seconds_per_epoch          devices,samples_per_second
    1,22.2                             1,350
    2,15.38                            2,690

What counts is the work of all devices for one epoch, `devices × seconds`: constant where scaling is perfect.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_limited

Scaling = Literal["weak", "strong"]
#: seconds per epoch, or samples per second
Kind = Literal["seconds", "rate"]

_MAX_BYTES, _MAX_ROWS = 1 << 16, 1000
_MAX_DEVICES = 10**6
_SMALLEST, _LARGEST = 1e-9, 1e15
#: names of columns, without case, spaces and underscores
_DEVICES = ("devices", "gpus", "replicas", "instances", "n")
_SECONDS = ("secondsperepoch", "seconds", "epochseconds", "s")
_RATES = ("samplespersecond", "samples/s", "throughput", "rate")
_RATES_EACH = ("samplespersecondperdevice", "samples/s/device")
_MIN_COUNTS = 3


@dataclass(frozen=True)
class ScalingTable:
    """Seconds per epoch by number of devices; from rates, an epoch is one sample."""

    devices: tuple[int, ...]
    seconds: tuple[float, ...]
    #: what the file had
    kind: Kind = "seconds"

    def up_to(self, most: int) -> "ScalingTable":
        """Return the rows of at most so many devices."""
        rows = [(n, s) for n, s in zip(self.devices, self.seconds, strict=True) if n <= most]
        return ScalingTable(tuple(n for n, _ in rows), tuple(s for _, s in rows), self.kind)


def read_table(path: Path) -> ScalingTable:
    """Read a table; raise UserError, with the line, for whatever is not one."""
    try:
        text = read_limited(path, _MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--from {path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"--from {path}: it cannot be read: {system_reason(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"--from {path}: it is not text in UTF-8") from None
    try:
        return parse_table(text)
    except ValueError as error:
        raise UserError(f"--from {path}: {error}") from None


def parse_table(text: str) -> ScalingTable:
    """Return the table of CSV text; raise ValueError with the reason if it holds none."""
    # The csv module would go on through quotes that are never closed; rows of numbers need no quotes.
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]
    if not lines:
        raise ValueError("it is empty: expected a line `devices,seconds_per_epoch` and one line for each count")
    if len(lines) > _MAX_ROWS:
        raise ValueError(f"it has more than {_MAX_ROWS} lines")
    try:
        header, *rows = list(csv.reader(io.StringIO("\n".join(line for _, line in lines)), strict=True))
    except csv.Error as error:
        raise ValueError(f"it is not CSV: {error}") from None
    names = ["".join(c for c in name.lower() if c not in " _") for name in header]
    devices = _column(names, _DEVICES)
    found = [(kind, at) for kind, known in _KINDS.items() if (at := _column(names, known)) is not None]
    if devices is None or len(found) != 1:
        raise ValueError(
            "its first line must name a column `devices` and one of `seconds_per_epoch`, `samples_per_second` and "
            "`samples_per_second_per_device`"
        )
    ((kind, at),) = found
    values: dict[int, list[float]] = {}
    for (number, _), row in zip(lines[1:], rows, strict=False):
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} columns, not {len(header)}")
        count, value = _count(row[devices], number), _value(row[at], number)
        values.setdefault(count, []).append(_seconds(kind, count, value))
    if len(values) < _MIN_COUNTS:
        raise ValueError(f"it has {len(values)} different counts of devices, and at least {_MIN_COUNTS} are needed")
    ordered = sorted(values)
    # Repeated measurements of a count: their mean.
    means = tuple(math.fsum(values[count]) / len(values[count]) for count in ordered)
    return ScalingTable(tuple(ordered), means, "seconds" if kind == "seconds" else "rate")


_KINDS = {"seconds": _SECONDS, "rate": _RATES, "rate_each": _RATES_EACH}


def _column(names: list[str], known: tuple[str, ...]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _count(text: str, line: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= _MAX_DEVICES):
        raise ValueError(f"line {line}: {text[:40]!r} is no number of devices from 1 to {_MAX_DEVICES:,}")
    return int(text)


def _value(text: str, line: int) -> float:
    try:
        value = float(text) if len(text) < 40 else math.nan
    except ValueError:
        value = math.nan
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"line {line}: {text.strip()[:40]!r} is no time or rate above 0")
    return value


def _seconds(kind: str, count: int, value: float) -> float:
    if kind == "seconds":
        return value
    return 1.0 / (value * count if kind == "rate_each" else value)
