"""What a person sees while data is made: sentences and a bar on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_console = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    _console.print(escape(text), soft_wrap=True)


@contextmanager
def bar(doing: str, *, counted: bool) -> Iterator[Callable[[float, float], None]]:
    """A bar in a terminal, nothing elsewhere; yields what to call with how much is done and how much there is.

    Counted things are shown as so many of so many, others as a percentage.
    """
    amount: ProgressColumn = MofNCompleteColumn() if counted else TaskProgressColumn()
    columns = (TextColumn(doing), BarColumn(bar_width=24), amount, TimeRemainingColumn())
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
