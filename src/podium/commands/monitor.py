"""`podium monitor RUN`: a run that goes on, in this terminal or in a browser. Ending it does nothing to the run."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.live import Live

from podium.monitor.screen import Screen
from podium.monitor.view import View, Watcher
from podium.runs.folder import Run
from podium.ui import console

#: how often the run is looked at, and the keys and the size of the terminal
_LOOK_S, _KEYS_S = 1.0, 0.1
_END_KEYS = frozenset(b"qQ\x03\x1b")
_HELP = "q: end (the run goes on)"


def monitor(run: Run) -> None:
    """Show a run until a key ends it; once, where standard output is no terminal."""
    watcher = Watcher(run)
    if not console.out.is_terminal or not sys.stdin.isatty():
        console.out.print(Screen(watcher.look()))
        return
    view = watcher.look()
    with suppress(KeyboardInterrupt), _interruptible(), _single_keys():
        view = _show(watcher, view)
    console.say(_farewell(run, view))


def serve(run: Run, port: int = 0) -> None:
    """Show a run to browsers on this machine until Ctrl-C."""
    from podium.monitor.web import WebView

    view = WebView(Watcher(run), port)
    console.out.print(view.address, soft_wrap=True)
    sys.stdout.flush()
    console.say("open this address in a browser on this machine; Ctrl-C ends the page, not the run")
    with suppress(KeyboardInterrupt):
        view.serve()


def _show(watcher: Watcher, view: View) -> View:
    with Live(console=console.out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                size = console.out.size
                # The last line stays empty: a terminal may scroll when it is full.
                live.update(Screen(view, size.height - 1, _HELP), refresh=True)
                due = time.monotonic() + _LOOK_S
                while time.monotonic() < due and console.out.size == size:
                    if _pressed(_KEYS_S) & _END_KEYS:
                        return view
                view = watcher.look()
        except KeyboardInterrupt:
            return view


def _farewell(run: Run, view: View) -> str:
    of = f" after update {view.update:,} of {view.total_updates:,}" if view.total_updates else ""
    return f"{run.path}: {view.state}{of}{f': {view.sentence}' if view.sentence else ''}"


def _pressed(seconds: float) -> frozenset[int]:
    """Return the keys pressed within a time; a standard input that has ended counts as q."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return frozenset()
    return frozenset(os.read(sys.stdin.fileno(), 1024) or b"q")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Hear Ctrl-C also where whoever started this process ignored it, as shells do for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Have the terminal hand over keys at once, without showing them."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
