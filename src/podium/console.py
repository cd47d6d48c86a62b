"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table as RichTable

from podium.workloads.base import Table

#: Results and tables go to standard output, so that they can be piped; progress and messages to standard error.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

#: Seconds between two plain lines when nothing else makes one due.
PLAIN_EVERY_S = 10.0


def say(text: str) -> None:
    """A message, on standard error."""
    err.print(escape(text), soft_wrap=True)


def warn(text: str) -> None:
    """Something the user should know, but that stops nothing."""
    err.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def show_table(table: Table) -> None:
    """A table on standard output."""
    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", caption=table.caption or None)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    out.print(drawn)


def clock_text(seconds: float) -> str:
    """3725 -> 1:02:05"""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float) -> str:
    """Four significant digits, thousands grouped; small and large ones in powers of ten."""
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Display(Protocol):
    """Progress of a run; use as a context manager."""

    def update(self, done: int, total: int, facts: Mapping[str, Any], *, milestone: bool = False) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def _facts_text(facts: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items())


class LiveDisplay:
    """A bar that is drawn over and over, in a terminal; milestones (a validation) stay on the screen above it."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24, complete_style="cyan"),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[facts]}"),
            console=err,
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task("training", total=None, facts="")

    def update(self, done: int, total: int, facts: Mapping[str, Any], *, milestone: bool = False) -> None:
        self._progress.update(self._task, completed=done, total=total, facts=_facts_text(facts))
        if milestone:
            self._progress.console.print(_facts_text(facts), style="dim", soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class PlainDisplay:
    """A line at milestones and every few seconds in between."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def update(self, done: int, total: int, facts: Mapping[str, Any], *, milestone: bool = False) -> None:
        now = time.monotonic()
        if milestone or now - self._last >= PLAIN_EVERY_S:
            self._last = now
            say(_facts_text(facts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


def progress_display() -> Display:
    """The display that fits where standard error goes."""
    return LiveDisplay() if err.is_terminal else PlainDisplay()
