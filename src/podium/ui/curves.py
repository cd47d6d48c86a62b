"""Curves as characters, for terminals: each character is two by four dots of a Braille pattern.

Written here, as it is one function: plotext keeps one figure for the whole process, and has renamed its functions
between releases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from podium.ui.console import number

_FIRST, _DOTS = 0x2800, ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_LABEL = 9
#: from this factor between the least and the largest value on, the axis is logarithmic
_LOG_FROM = 20.0


@dataclass(frozen=True)
class Curve:
    """A line through points in ascending order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "cyan"


def draw_curves(
    curves: Sequence[Curve], width: int, height: int, x_name: str, *, ascii_only: bool = False
) -> list[Text]:
    """Return `height` lines of at most `width` characters: the curves with the range of both axes."""
    curves = [Curve(one.name, kept, one.style) for one in curves if (kept := _finite(one.points))]
    if not curves or height < 4 or width < _LABEL + 8:
        return [Text("no records yet", "dim")] if height > 0 else []
    values = [y for one in curves for _, y in one.points]
    log = min(values) > 0 and max(values) > _LOG_FROM * min(values)
    scale = math.log if log else float
    low, high = scale(min(values)), scale(max(values))
    first, last = min(one.points[0][0] for one in curves), max(one.points[-1][0] for one in curves)
    columns, rows = width - _LABEL - 1, height - 2
    dots: dict[tuple[int, int], tuple[int, str]] = {}
    for one in curves:
        before: tuple[int, int] | None = None
        for x, y in one.points:
            across = (x - first) / (last - first) if last > first else 0.5
            up = (scale(y) - low) / (high - low) if high > low else 0.5
            place = round(across * (2 * columns - 1)), round((1 - up) * (4 * rows - 1))
            for column, row in _between(before, place):
                pattern = dots.get((column // 2, row // 4), (0, ""))[0] | _DOTS[column % 2][row % 4]
                dots[column // 2, row // 4] = pattern, one.style
            before = place
    title = Text(" " * _LABEL + " ", no_wrap=True)
    for one in curves:
        title.append("● " if not ascii_only else "* ", one.style).append(f"{one.name}  ")
    title.truncate(width, overflow="ellipsis")
    lines = [title]
    for row in range(rows):
        label = number(max(values)) if row == 0 else number(min(values)) if row == rows - 1 else ""
        line = Text(f"{label:>{_LABEL}} ", "dim", no_wrap=True)
        for column in range(columns):
            pattern, style = dots.get((column, row), (0, ""))
            line.append("*" if ascii_only and pattern else chr(_FIRST + pattern) if pattern else " ", style)
        lines.append(line)
    begin, end = number(first), f"{x_name} {number(last)}{' · logarithmic' if log else ''}"
    lines.append(Text(" " * (_LABEL + 1) + begin + end.rjust(columns - len(begin)), "dim", no_wrap=True))
    return lines


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and abs(y) < 1e300]


def _between(before: tuple[int, int] | None, place: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line from `before`, which has its own already, to `place`."""
    if before is None:
        return [place]
    (x0, y0), (x1, y1) = before, place
    steps = max(abs(x1 - x0), abs(y1 - y0))
    return [(x0 + round((x1 - x0) * k / steps), y0 + round((y1 - y0) * k / steps)) for k in range(1, steps + 1)]
