"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere. Also the run's log."""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable

from podium.errors import Interrupted, PodiumError, UserError, writing
from podium.machine.bounded_files import append_regular, read_limited
from podium.ui import streams
from podium.ui.notebook import NotebookDisplay, in_notebook
from podium.ui.progress_line import facts_text, progress_line
from podium.ui.table import Table
from podium.ui.visible import visible, visible_lines

#: Results and tables go to standard output, so that they can be piped; progress and messages to standard error.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

#: Seconds between two plain lines where no validation makes one due.
PLAIN_EVERY_S = 10.0


#: what an instance may have logged before it knows where its log is
_LOG_BYTES = 64 << 20

#: Where messages are written beside the console, once there is a run folder.
_log: Path | None = None
_log_is_console = False


def say(text: str) -> None:
    """Print a message on standard error."""
    err.print(escape(visible_lines(text)), soft_wrap=True)
    _keep(text)


def warn(text: str) -> None:
    """Print something that the user should know, but that stops nothing."""
    err.print(f"[yellow]warning:[/] {escape(visible_lines(text))}", soft_wrap=True)
    _keep(f"warning: {text}")


@contextmanager
def only_warned(consequence: str, errors: type[Exception] = UserError) -> Iterator[None]:
    """Turn errors of a kind into a warning that ends with their consequence; a request to stop is never one."""
    try:
        yield
    except Interrupted:
        raise
    except errors as error:
        if not isinstance(error, PodiumError):
            keep_traceback()
        reason = str(error) if isinstance(error, PodiumError) else f"{type(error).__name__}: {error}"
        warn(f"{' '.join(reason.split())}; {consequence}")


def keep_log(path: Path) -> None:
    """Append messages to `path` as well from now on."""
    global _log
    _log = path
    for sentence in streams.failures():
        _keep(f"warning: {sentence}")


def log_path() -> Path | None:
    """Return where messages are logged, if anywhere."""
    return _log


def keep_traceback() -> None:
    """Write the traceback of the exception being handled into the log, or on standard error where there is none."""
    if _log is None or _log_is_console:
        traceback.print_exc()
    else:
        with suppress(OSError), append_regular(_log) as file:
            file.write(traceback.format_exc().encode(errors="backslashreplace"))


def write_everything_to(path: Path) -> None:
    """Send both standard streams, of torch's libraries too, to the end of a file; move the earlier log there.

    For all instances but the first, which alone writes on the console.
    """
    global _log, _log_is_console
    earlier = read_limited(_log, _LOG_BYTES) if _log is not None and _log.exists() else b""
    sys.stdout.flush()
    sys.stderr.flush()
    with writing(path):
        file = append_regular(path)
    with file:
        file.write(earlier)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if _log is not None:
        _log.unlink(missing_ok=True)
    _log, _log_is_console = path, True


def speak_again() -> None:
    """Take note that the standard streams are those of the console again."""
    global _log, _log_is_console
    _log, _log_is_console = None, False


def _keep(text: str) -> None:
    if _log is not None and not _log_is_console:
        with suppress(OSError), append_regular(_log) as file:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible_lines(text)}\n"
            file.write(line.encode())


def _keep_failure(stream: int, sentence: str) -> None:
    """Tell in the log that a standard stream cannot be written; on standard error, too, where a finished training
    cannot print its results. Other commands fail in that case, and `cli` says so."""
    _keep(f"warning: {sentence}")
    if stream == 1 and streams.are_results_kept():
        err.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True)


streams.on_failure(_keep_failure)


def show_table(table: Table, *, message: bool = False) -> None:
    """Print a table on standard output, or on standard error where it is only a message."""
    drawn = RichTable(
        title=escape(visible(table.title)) or None,
        title_justify="left",
        title_style="bold",
        show_header=any(table.columns),
        show_lines=any(cell.count("\n") > 2 for row in table.rows for cell in row),  # separates long texts
    )
    for index, column in enumerate(table.columns):
        numeric = index > 0 and all(row[index][:1] in "+-−–.0123456789" for row in table.rows)
        # What a row is called is shown whole in a narrow terminal, too.
        overflow: OverflowMethod = "ellipsis" if index else "fold"
        drawn.add_column(escape(visible(column)), justify="right" if numeric else "left", overflow=overflow)
    for row in table.rows:
        drawn.add_row(*(escape(visible_lines(cell)) for cell in row))
    where = err if message else out
    where.print(drawn)
    if table.caption:
        where.print(escape(visible_lines(table.caption)), style="dim", soft_wrap=True)


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
