"""The time spent in each phase of a run: one phase at a time, so that they add up to the total. Also processor use."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = ("startup", "compile", "train", "input_wait", "communication", "valid", "checkpoint", "report")


class Clock:
    """The seconds of each phase. Phases nest: the outer one is paused while an inner one runs.

    Saved in checkpoints, so that a resumed run continues counting.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._current = "startup"
        self._since = self._began = time.perf_counter()
        self._before = 0.0  # total of the run before it was resumed

    def restore(self, seconds: Mapping[str, float]) -> None:
        for name in PHASES:
            self._seconds[name] += seconds.get(name, 0.0)
        self._before = seconds.get("total", 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, name: str, seconds: float) -> None:
        """Move `seconds` of the current phase to another one (for a wait that was timed inside it)."""
        self._seconds[self._current] -= seconds
        self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and `total`, which is measured independently of them."""
        self._switch(self._current)
        total = self._before + time.perf_counter() - self._began
        return {**self._seconds, "total": total}

    def peek(self) -> tuple[dict[str, float], str]:
        """Return the seconds of each phase and the current phase. Changes nothing: other threads may call it."""
        for _ in range(3):
            since, seconds, current = self._since, dict(self._seconds), self._current
            if since == self._since:  # else the phase changed in between
                break
        seconds[current] += time.perf_counter() - since
        return seconds, current

    def _switch(self, name: str) -> str:
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        outer, self._current, self._since = self._current, name, now
        return outer


class Utilisation:
    """The percentage of `num_cores` that this process uses."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._start = self._last = self._now()

    def percent(self) -> float:
        """Return the percentage since the last call."""
        last, self._last = self._last, self._now()
        return self._percent_between(last, self._last)

    def percent_since_start(self) -> float:
        return self._percent_between(self._start, self._now())

    def _percent_between(self, before: tuple[float, float], now: tuple[float, float]) -> float:
        return 100.0 * (now[1] - before[1]) / max(1e-9, now[0] - before[0]) / self._num_cores

    def _now(self) -> tuple[float, float]:
        # Counted in nanoseconds: the system's other counter has steps of 10 ms, longer than some records take.
        return time.perf_counter(), time.process_time()
