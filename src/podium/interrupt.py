"""Requests to stop: signals and the time limit. The loop asks after every update; handlers tear nothing down."""

import os
import signal
import time
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
        if number == signal.SIGINT:
            if self._asked_by_hand:
                if os.isatty(2):
                    os.write(2, b"\x1b[?25h\n")  # the live display hides the cursor
                os._exit(130)
            self._asked_by_hand = True
        self._signal = signal.Signals(number).name
