"""Requests to stop: signals and the time limit, from the start of the process to its end.

Until a run has begun, a signal ends the process, as there is nothing to save; from then on the loop asks after every
update. Imported before anything heavy, so that a signal is heard while the rest is being loaded.
"""

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Literal, Self

from podium.errors import Interrupted, PodiumError
from podium.terminal import leave_closed_terminal

if TYPE_CHECKING:
    from podium.engine.instances import Instances

#: What is said to a signal that is only noted, and about a second SIGINT.
_ANSWERS = {
    "training": ("stopping and saving after this update", "stops at once, without saving"),
    "done": ("the training is done and saved, the rest is being finished", "stops at once"),
}


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask to stop. SIGHUP, which a closing terminal sends, is one unless it is ignored, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


class StopRequest:
    """While entered, SIGTERM, SIGHUP, SIGINT and SIGUSR1 ask to stop; a second SIGINT ends the process at once.

    A signal sets `reason`. Between `answer_at_once` and `begin` it also raises Interrupted, wherever the process is;
    not before, as libraries do not bear that while they are being loaded. May be entered again inside itself.
    """

    def __init__(self, process: int | None = None) -> None:
        #: the process whose start the time limit counts from; None: from now
        self.process = process
        #: whether a signal that is only noted is worth a word
        self.speaks: Callable[[], bool] = lambda: True
        #: how to go on after a signal that comes before `begin`
        self.advice = "nothing was lost: the same command starts it again"
        self._created = time.monotonic()
        self._deadline: float | None = None
        self._signal: str | None = None
        self._asked_by_hand = False
        self._phase: Literal["loading", "preparing", "training", "done"] = "loading"
        self._previous: list[dict[int, object]] = []

    @property
    def reason(self) -> str | None:
        """Why to stop, or None to go on."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "the time limit"
        return self._signal

    def limit_to(self, seconds: float | None) -> None:
        """Asks to stop so long after the start of `process`."""
        if seconds is not None:
            began = self._created if self.process is None else time.monotonic() - _age_s(self.process)
            self._deadline = began + seconds

    def answer_at_once(self) -> None:
        """From now on a signal ends the start at once; one that came before does so here."""
        self._phase = "preparing"
        if self._signal is not None:
            raise self._interrupted()

    def begin(self, instances: "Instances") -> None:
        """The last moment at which a signal ends the start, for all instances alike; later ones are only noted."""
        import torch

        self._phase = "training"
        if instances.gather(torch.tensor([self._signal is not None], dtype=torch.uint8)).any():
            raise self._interrupted()

    def finish(self) -> None:
        """The training is done and saved: nothing is left that could be lost."""
        self._phase = "done"

    def __enter__(self) -> Self:
        self._previous.append({number: signal.signal(number, self._handle) for number in stop_signals()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.pop().items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # A library may have made another error of ours, and an instance may have lost one that was stopped like it.
        stopped = self._signal is not None and self._phase == "preparing"
        if stopped and isinstance(error, Exception) and not isinstance(error, PodiumError):
            raise self._interrupted() from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        leave_closed_terminal()
        if number == signal.SIGINT and self._asked_by_hand:
            _write("\x1b[?25h" if os.isatty(2) else "")  # the live display hid the cursor
            os._exit(130)
        self._asked_by_hand |= number == signal.SIGINT
        first, self._signal = self._signal is None, self._signal or name
        if self._phase == "preparing" and first:  # a second one must not disturb what is being cleared away
            raise self._interrupted()
        again = number == signal.SIGINT
        if self._phase in _ANSWERS and (first or again) and self.speaks():
            answer, once_more = _ANSWERS[self._phase]
            _write(f"\n{name}: {answer}{f'; once more {once_more}' if again else ''}\n")

    def _interrupted(self) -> Interrupted:
        by = self._signal or "a request to another instance"
        return Interrupted(f"stopped by {by} before the first update; {self.advice}")


def resume_continues(run: Path) -> str:
    """How to go on with a run that has a folder."""
    return f"`podium resume {shlex.quote(str(run))}` continues"


def _age_s(process: int) -> float:
    import psutil

    return max(0.0, time.time() - psutil.Process(process).create_time())


def _write(text: str) -> None:
    """Past Python's streams: the signal may have come in the middle of one of their writes."""
    with suppress(OSError):
        os.write(2, text.encode())
