"""Where the runs of a study are trained. `Executor` is the seam: a scheduler's jobs can take the place of processes.

`conduct.py` calls it from one thread. A run is named by its number; what it writes is found in the study folder, so
all that an executor has to tell is that a run has ended, and how.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from podium.errors import writing
from podium.launch.lifeline import LAUNCHER
from podium.machine.bounded_files import append_regular
from podium.machine.memory import host_bytes

_LOOK_S = 0.1
#: what a run is taken to need before any was seen, and how much of what was seen must be free for one more
_FIRST_GUESS_BYTES = 600 << 20
_SPARE = 1.2
_MEASURE_EVERY_S = 1.0


class Executor(Protocol):
    """Starts runs, tells which have ended, ends them. `Conductor` decides what is started, and reads what came out.

    What one that hands runs to a scheduler has to keep to:

    - **One place to write.** All that a run leaves is in the study folder, which its host must see under the same path;
      words may hold paths relative to the folder in which the command was called, so it must run there. Nothing is sent
      back but the exit code.
    - **Never twice at a time.** A run is started once, until `wait` has told of its end. A job that an earlier command
      has left behind is adopted by `start`, not submitted again: keep its name beside the run's log. (A run that is
      already training is not started: `Conductor` sees its lock and waits.)
    - **Exit codes as they are.** 0: done. 75: it has saved, and is continued when there is more to do. 2, and 3 of one
      instance: it would end like that again, and is not repeated. Anything else, -15 and -9 for a job that a scheduler
      has ended, 1 for one that is lost: a crash, tried again from the last checkpoint as often as `--retries` says.
    - **Threads and instances are in the words and the recipe.** Cores, memory and devices are the executor's affair and
      change no result.
    - **It is asked from one thread**, ten times a second or more rarely: no call may take longer than a second or two,
      as Ctrl-C is answered in between. An error that is the user's to solve is a `UserError`; everything that runs is
      then asked to end.
    """

    def has_room(self) -> bool:
        """Return whether one more run may be started now. A queue always has room."""
        ...

    def start(self, number: int, words: Sequence[str], log: Path) -> None:
        """Start `podium WORDS` for a run and return at once; what it prints is added to the end of `log`."""
        ...

    def wait(self) -> dict[int, int]:
        """Return soon, with the exit codes of the runs that have ended since the last call, each told once.

        Negative codes are numbers of signals. It may sleep for a moment, so that nobody asks without a pause.
        """
        ...

    def end(self) -> None:
        """Ask all runs to save and end, as SIGTERM does; `wait` tells when they have.

        Jobs that shall outlive the command are let go instead: `running` then leaves them out.
        """
        ...

    def kill(self) -> None:
        """End all runs at once, without saving. Called from a signal's handler, too."""
        ...

    def running(self) -> list[int]:
        """Return the numbers of the runs that were started and have not been told to have ended."""
        ...


def start_run(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start the process of one run, in a session of its own: it hears of Ctrl-C from the study alone."""
    with writing(log):
        file = append_regular(log)
    with file:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


class LocalProcesses:
    """Runs as processes of this host, each on cores of its own. They end when this process does, however it ends."""

    def __init__(self, num_slots: int, cores: Sequence[int], *, watch_memory: bool) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._slots: dict[int, int] = {}
        share = len(cores) // num_slots
        #: by slot; None: cores are fewer than runs, and the system divides them better
        self._cores = [{*cores[slot * share : (slot + 1) * share]} or None for slot in range(num_slots)]
        self._watches_memory = watch_memory
        self._largest_bytes, self._measured_at = 0, 0.0

    def has_room(self) -> bool:
        if len(self._processes) >= len(self._cores):
            return False
        if not self._watches_memory or not self._processes:
            return True
        return host_bytes()[1] > _SPARE * (self._largest_bytes or _FIRST_GUESS_BYTES)

    def start(self, number: int, words: Sequence[str], log: Path) -> None:
        slot = next(slot for slot in range(len(self._cores)) if slot not in self._slots.values())
        # It ends with this process (launch/lifeline.py).
        env = {**os.environ, LAUNCHER: str(os.getpid())}
        with _on_cores(self._cores[slot]):
            self._processes[number] = start_run([sys.executable, "-m", "podium", *words], env, log)
        self._slots[number] = slot

    def wait(self) -> dict[int, int]:
        time.sleep(_LOOK_S)
        self._measure()
        codes = {number: process.poll() for number, process in self._processes.items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        for number in ended:
            del self._processes[number], self._slots[number]
        return ended

    def end(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def running(self) -> list[int]:
        return list(self._processes)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _measure(self) -> None:
        """Note the memory of the largest run so far, its instances included."""
        if not self._watches_memory or time.monotonic() < self._measured_at + _MEASURE_EVERY_S:
            return
        self._measured_at = time.monotonic()
        for process in self._processes.values():
            with suppress(psutil.Error):
                lead = psutil.Process(process.pid)
                used = sum(one.memory_info().rss for one in (lead, *lead.children(recursive=True)))
                self._largest_bytes = max(self._largest_bytes, used)


class _on_cores:  # noqa: N801 (reads as what it does)
    """Let processes that are started inside have these cores: they inherit those of the thread that starts them."""

    def __init__(self, cores: set[int] | None) -> None:
        self._cores, self._before = cores, set[int]()

    def __enter__(self) -> None:
        if self._cores and hasattr(os, "sched_setaffinity"):
            self._before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores)

    def __exit__(self, *_: object) -> None:
        if self._before:
            os.sched_setaffinity(0, self._before)
