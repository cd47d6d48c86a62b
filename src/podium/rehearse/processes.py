"""Processes that a stand-in has started: found in its notes, and ended with their children."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from podium.rehearse.stand_in import TASKS


def num_lines(path: Path) -> int:
    """Return how many lines a stand-in has left; 0 where there is no file yet."""
    with suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0


def signal_tasks(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the processes of the newest step."""
    for _, task in _newest(folder):
        with suppress(psutil.Error):
            task.send_signal(number)


def kill_tasks(folder: Path, node: str) -> None:
    """Kill everything that the newest step runs on a node."""
    for where, task in _newest(folder):
        if where == node:
            kill_family(task.pid)


def kill_family(process: int) -> None:
    """Kill a process and all that it has started."""
    with suppress(psutil.Error):
        family = psutil.Process(process)
        for one in (*family.children(recursive=True), family):
            with suppress(psutil.Error):
                one.kill()


def _newest(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    lines = [line.split() for line in (folder / TASKS).read_text(encoding="utf-8").splitlines()]
    last = max((int(step) for step, _, _ in lines), default=0)
    for step, node, process in lines:
        with suppress(psutil.Error):
            if int(step) == last:
                yield node, psutil.Process(int(process))
