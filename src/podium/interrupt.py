"""Requests to stop: signals and the time limit. The loop asks after every update; handlers tear nothing down."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 set `reason`; a second SIGINT ends the process at once."""

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._signal: str | None = None
        self._asked_by_hand = False
        self._previous: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        """Why to stop, or None to go on."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "the time limit"
        return self._signal

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._asked_by_hand:
            _write("\x1b[?25h" if os.isatty(2) else "")  # the live display hid the cursor
            os._exit(130)
        self._asked_by_hand |= number == signal.SIGINT
        again = "; once more stops at once, without saving" if number == signal.SIGINT else ""
        if self._signal is None or again:
            _write(f"\n{name}: stopping and saving after this update{again}\n")
        self._signal = name


def _write(text: str) -> None:
    """Past Python's streams: the signal may have come in the middle of one of their writes."""
    with suppress(OSError):
        os.write(2, text.encode())
