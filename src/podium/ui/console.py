"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere. Also the run's log."""

import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable

from podium.ui.notebook import NotebookDisplay, in_notebook
from podium.ui.progress_line import facts_text, progress_line
from podium.ui.table import Table
from podium.ui.terminal import leave_closed_terminal


class _Console(Console):
    """rich's own, but a terminal that has been closed in the meantime is not an error."""

    def print(self, *objects: Any, **options: Any) -> None:
        leave_closed_terminal()
        super().print(*objects, **options)


#: Results and tables go to standard output, so that they can be piped; progress and messages to standard error.
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)

#: Seconds between two plain lines where no validation makes one due.
PLAIN_EVERY_S = 10.0


#: Where messages are written beside the console, once there is a run folder.
_log: Path | None = None
_log_is_console = False


def say(text: str) -> None:
    """Print a message on standard error."""
    err.print(escape(text), soft_wrap=True)
    _keep(text)


def warn(text: str) -> None:
    """Print something that the user should know, but that stops nothing."""
    err.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)
    _keep(f"warning: {text}")


def keep_log(path: Path) -> None:
    """Append messages to `path` as well from now on."""
    global _log
    _log = path


def log_path() -> Path | None:
    """Return where messages are logged, if anywhere."""
    return _log


def keep_traceback() -> None:
    """Write the traceback of the exception being handled into the log, or on standard error where there is none."""
    if _log is None or _log_is_console:
        traceback.print_exc()
    else:
        with suppress(OSError), _log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)


def write_everything_to(path: Path) -> None:
    """Send both standard streams, of torch's libraries too, to the end of a file; move the earlier log there.

    For all instances but the first, which alone writes on the console.
    """
    global _log, _log_is_console
    earlier = _log.read_bytes() if _log is not None and _log.exists() else b""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        file.write(earlier)
        file.flush()
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if _log is not None:
        _log.unlink(missing_ok=True)
    _log, _log_is_console = path, True


def _keep(text: str) -> None:
    if _log is not None and not _log_is_console:
        with suppress(OSError), _log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def show_table(table: Table, *, message: bool = False) -> None:
    """Print a table on standard output, or on standard error where it is only a message."""
    drawn = RichTable(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        show_header=any(table.columns),
        show_lines=any(cell.count("\n") > 2 for row in table.rows for cell in row),  # separates long texts
    )
    for index, column in enumerate(table.columns):
        numeric = index > 0 and all(row[index][:1] in "+-−.0123456789" for row in table.rows)
        drawn.add_column(column, justify="right" if numeric else "left")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    where = err if message else out
    where.print(drawn)
    if table.caption:
        where.print(escape(table.caption), style="dim", soft_wrap=True)


def clock_text(seconds: float) -> str:
    """Return a duration as a clock shows it: 3725 -> 1:02:05."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float) -> str:
    """Return a value with four significant digits, thousands grouped; very small and large ones in powers of ten."""
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Display(Protocol):
    """Progress of a run; use as a context manager."""

    def update(self, done: int, total: int, facts: Mapping[str, str], *, milestone: bool = False) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class LiveDisplay:
    """A line that is redrawn in place, in a terminal; milestones (a validation) stay on the screen above it."""

    def __init__(self, what: str) -> None:
        self._what, self._share, self._facts = what, 0.0, dict[str, str]()
        self._live = Live(self, console=err, transient=True, refresh_per_second=5)

    def update(self, done: int, total: int, facts: Mapping[str, str], *, milestone: bool = False) -> None:
        self._share, self._facts = done / max(1, total), dict(facts)
        if milestone:
            self._live.console.print(facts_text(facts), style="dim", soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield progress_line(self._what, self._share, self._facts, options.max_width, ascii_only=options.ascii_only)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()


class PlainDisplay:
    """A line at milestones and every few seconds in between."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def update(self, done: int, total: int, facts: Mapping[str, str], *, milestone: bool = False) -> None:
        now = time.monotonic()
        if milestone or now - self._last >= PLAIN_EVERY_S:
            self._last = now
            say(facts_text(facts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class NoDisplay(PlainDisplay):
    """Shows nothing: for all instances but the first."""

    def update(self, done: int, total: int, facts: Mapping[str, str], *, milestone: bool = False) -> None:
        pass


def progress_display(lead: bool = True, what: str = "training") -> Display:
    """Return the display that suits standard error: a live line in a terminal or a notebook, plain lines elsewhere."""
    if not lead:
        return NoDisplay()
    if in_notebook():
        return NotebookDisplay(what)
    return LiveDisplay(what) if err.is_terminal else PlainDisplay()
