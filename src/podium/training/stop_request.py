"""Requests to stop: signals and the time limit, from the start of the process to its end.

Until a run has begun, a signal ends the process, as there is nothing to save; from then on the loop checks after every
update. Imported before anything heavy, so that signals are handled while the rest is being loaded.
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
from podium.machine.signals import stop_signals

if TYPE_CHECKING:
    from podium.distributed.instances import Instances
    from podium.engine.state import Lengths
    from podium.recipe.durations import Duration

#: by phase: the answer to a signal that does not end the process at once, and what a second SIGINT does
_ANSWERS = {
    "training": ("stopping and saving after this update", "stops at once, without saving"),
    "done": ("the training is done and saved, the rest is being finished", "stops at once"),
}


class StopRequest:
    """A request to stop. While entered, SIGTERM, SIGHUP, SIGINT and SIGUSR1 ask to stop; a second SIGINT ends the
    process at once.

    A signal sets `reason`. Between `answer_at_once` and `begin` it also raises Interrupted, wherever the process is;
    not earlier, as libraries cannot handle that while they are being loaded. Reentrant.
    """

    def __init__(self, process: int | None = None, until: str | None = None) -> None:
        #: the process from whose start the time limit counts; None: from now
        self.process = process
        #: where in the training to stop, as `--until` has it; None: at its end
        self.until = None if until is None else _duration(until)
        self._last_update: int | None = None
        #: whether to print an answer to a signal that does not end the process at once
        self.speaks: Callable[[], bool] = lambda: True
        #: how to continue after a signal that arrives before `begin`
        self.advice = "nothing was lost: the same command starts it again"
        self._created = time.monotonic()
        self._deadline: float | None = None
        self._signal: str | None = None
        self._asked_by_hand = False
        self._phase: Literal["loading", "preparing", "training", "done"] = "loading"
        self._previous: list[dict[int, object]] = []

    @property
    def reason(self) -> str | None:
        """The reason to stop, or None to continue."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "the time limit"
        return self._signal

    def after(self, update: int) -> str | None:
        """Return the reason to stop once `update` updates are made, or None to continue."""
        if self._last_update is not None and update >= self._last_update:
            return f"--until {self.until}"
        return self.reason

    def find_end(self, lengths: "Lengths", update: int) -> None:
        """Turn `until` into a number of updates; raise Interrupted where `update`, those that are made, are enough."""
        if self.until is not None:
            self._last_update = lengths.updates(self.until)
            if update >= max(1, self._last_update):
                raise Interrupted(f"--until {self.until} is reached: {update} updates are made; {self.advice}")

    def agreed(self, instances: "Instances", update: int) -> bool:
        """Return whether any instance has a reason to stop once `update` updates are made: the same on all."""
        import torch

        return bool(instances.gather(torch.tensor([self.after(update) is not None], dtype=torch.uint8)).any())

    def flags(self) -> list[str]:
        """Return the options that say the same to the instances of a launch."""
        return [] if self.until is None else ["--until", str(self.until)]

    def limit_to(self, seconds: float | None) -> None:
        """Ask to stop `seconds` after the start of `process`."""
        if seconds is not None:
            began = self._created if self.process is None else time.monotonic() - _age_s(self.process)
            self._deadline = began + seconds

    def answer_at_once(self) -> None:
        """Let signals end the start at once from now on; one that arrived earlier does so here."""
        self._phase = "preparing"
        if self._signal is not None:
            raise self._interrupted()

    def begin(self, instances: "Instances") -> None:
        """End the start, on all instances, if a signal has arrived on any; later signals only set `reason`."""
        import torch

        self._phase = "training"
        if instances.gather(torch.tensor([self._signal is not None], dtype=torch.uint8)).any():
            raise self._interrupted()

    def finish(self) -> None:
        """Mark the training as done and saved, so that nothing can be lost any more."""
        self._phase = "done"

    def __enter__(self) -> Self:
        self._previous.append({number: signal.signal(number, self._handle) for number in stop_signals()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.pop().items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # A library may have replaced our error by its own, or this instance may have lost one that was also stopped.
        stopped = self._signal is not None and self._phase == "preparing"
        if stopped and isinstance(error, Exception) and not isinstance(error, PodiumError):
            raise self._interrupted() from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._asked_by_hand:
            _write("\x1b[?25h" if os.isatty(2) else "")  # the live display hid the cursor
            os._exit(130)
        self._asked_by_hand |= number == signal.SIGINT
        first, self._signal = self._signal is None, self._signal or name
        if self._phase == "preparing" and first:  # a second one must not disturb the cleanup
            raise self._interrupted()
        again = number == signal.SIGINT
        if self._phase in _ANSWERS and (first or again) and self.speaks():
            answer, once_more = _ANSWERS[self._phase]
            _write(f"\n{name}: {answer}{f'; once more {once_more}' if again else ''}\n")

    def _interrupted(self) -> Interrupted:
        by = self._signal or "a request to another instance"
        return Interrupted(f"stopped by {by} before the first update; {self.advice}")


def resume_continues(run: Path) -> str:
    """Return the sentence on how to continue a run that has a folder."""
    return f"`podium resume {shlex.quote(str(run))}` continues"


def _age_s(process: int) -> float:
    import psutil

    return max(0.0, time.time() - psutil.Process(process).create_time())


def _write(text: str) -> None:
    """Write to standard error without Python's streams: the signal may have interrupted one of their writes."""
    with suppress(OSError):
        os.write(2, text.encode())


def _duration(text: str) -> "Duration":
    from podium.recipe.durations import Duration  # pydantic with it, which `podium --help` does without

    return Duration.parse(text)
