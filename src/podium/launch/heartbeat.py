"""Instances watch one another: each counts up a number at the store, and one that stops counting is silent."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

from podium.launch.environment import Place
from podium.launch.lifeline import launcher_is_gone
from podium.launch.point import MeetingPoint

_BEAT_S = 0.5
#: more instances than this count more slowly, so that whoever keeps the store has no more to do
_NUM_UNHURRIED = 16
_STORE_TIMEOUT_S = 5.0


class Heartbeat:
    """Counts for this instance while it lives, and tells which others have stopped counting.

    Numbers are compared with themselves some time later, so no clock is needed.
    """

    def __init__(self, place: Place, point: MeetingPoint, hellos: Sequence[Mapping[str, Any]]) -> None:
        self._index, self._point = place.index, point
        #: what the others have said of themselves, by their seats
        self._hellos = dict(enumerate(hellos))
        self._beat_s = _BEAT_S * max(1.0, len(hellos) / _NUM_UNHURRIED)
        self._stop = threading.Event()
        # A connection of its own: the main thread may be waiting on the other one.
        self._store = dist.PrefixStore("heartbeat", point.connect(_STORE_TIMEOUT_S))
        self._thread = threading.Thread(target=self._beat, name="podium-heartbeat", daemon=True)
        self._thread.start()

    def close(self, *, in_order: bool = True) -> None:
        """Stop counting; where the run has not ended in order, tell the others that this one is not just silent."""
        self._stop.set()
        # A thread inside the store when the interpreter ends takes the process down with it.
        self._thread.join(2 * _STORE_TIMEOUT_S)
        if not in_order:
            with suppress(RuntimeError, dist.DistError):
                self._store.set(f"ending/{self._index}", "yes")

    def follow(self, hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Watch these instances from now on."""
        self._hellos = dict(hellos)

    def silent(self) -> list[tuple[int, str]]:
        """Return (instance, host) of those that count no more, though nothing says that they are dead, and end those
        of them that are stopped. To be asked before this instance ends."""
        with suppress(RuntimeError, dist.DistError):
            self._store.set(f"ending/{self._index}", "yes")
        found = self.silent_seats()
        for index in found:
            self._end_if_stopped(index)
        return [(index, str(self._hellos[index]["host"])) for index in found]

    def silent_seats(self) -> list[int]:
        """Return those that count no more, though nothing says that they are dead."""
        try:
            before = self._numbers()
            time.sleep(4 * self._beat_s)
            after = self._numbers()
            silent = [
                index
                for index in self._hellos
                if index != self._index and before[index] == after[index] and not self._store.check([f"ending/{index}"])
            ]
        except (RuntimeError, dist.DistError):
            # The store itself is out of reach: the process that keeps it has ended, or is cut off.
            if self._point.is_closed():
                return []
            own = self._hellos[self._index]["host"]
            silent = [index for index, hello in self._hellos.items() if hello["host"] != own]
        return [index for index in silent if not self.is_dead(index)]

    def _numbers(self) -> dict[int, bytes]:
        keys = {index: f"beat/{index}" for index in self._hellos}
        return {index: self._store.get(key) if self._store.check([key]) else b"" for index, key in keys.items()}

    def is_dead(self, index: int) -> bool:
        """Return True for an instance of this host whose process has ended: the launcher reports that."""
        return self._status(index) in (None, psutil.STATUS_ZOMBIE)

    def _end_if_stopped(self, index: int) -> None:
        """Kill an instance of this host that was stopped: it hears no signal, and the launcher would wait for it."""
        if self._status(index) == psutil.STATUS_STOPPED:
            with suppress(psutil.Error):
                psutil.Process(self._hellos[index]["pid"]).kill()

    def _status(self, index: int) -> str | None:
        """Return psutil's word for what the process does; None: there is none, empty: it is on another host."""
        if self._hellos[index]["host"] != self._hellos[self._index]["host"]:
            return ""
        try:
            return str(psutil.Process(self._hellos[index]["pid"]).status())
        except psutil.Error:
            return None

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(self._beat_s):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
            except (RuntimeError, dist.DistError):
                if launcher_is_gone(os.environ):  # for systems that do not tell an instance by themselves
                    os.kill(os.getpid(), signal.SIGTERM)
                return
