"""Signals that ask a process to stop, used by training, and by the launcher, which hands them to its instances; and the
one by which it stops waiting for code of a user."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask to stop. SIGHUP, which a closing terminal sends, is one unless it is ignored, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


@contextmanager
def stop_signals_heard(hear: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hand the signals that ask to stop to `hear`."""
    before = {number: signal.signal(number, hear) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class TookTooLong(BaseException):
    """Code did not come back in its time. Nothing that code of a user would catch by chance."""


def can_handle_signals() -> bool:
    """Return whether this thread is the one that signals interrupt."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in code that takes longer, where this is the main thread; once more each second, should it go
    on. What waits in C without letting Python look at signals is waited for."""
    if not can_handle_signals():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise TookTooLong

    handler, began = signal.signal(signal.SIGALRM, end), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)), interval)
