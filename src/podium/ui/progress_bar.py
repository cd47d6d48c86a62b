"""A progress bar on the console, for work whose end is known: simulating, tokenising."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from podium.ui.console import err


@contextmanager
def progress_bar(doing: str, *, counted: bool) -> Iterator[Callable[[float, float], None]]:
    """Show a bar in a terminal, nothing elsewhere; yield what to call with (done, total).

    Counted things appear as "so many of so many", others as a percentage.
    """
    amount: ProgressColumn = MofNCompleteColumn() if counted else TaskProgressColumn()
    columns = (TextColumn(doing), BarColumn(bar_width=24), amount, TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
