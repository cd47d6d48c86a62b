"""Instances watch one another: each counts up a number at the store, and one that stops counting is silent."""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from podium.launch.environment import Place

_BEAT_S = 0.5
_STORE_TIMEOUT_S = 5.0


class Heartbeat:
    """Counts for this instance while it lives, and tells which others have stopped counting.

    Numbers are compared with themselves some time later, so no clock is needed.
    """

    def __init__(self, place: Place, hellos: Sequence[Mapping[str, Any]]) -> None:
        self._index, self._hellos, self._store_address = place.index, hellos, (place.address, place.port)
        self._stop = threading.Event()
        # A connection of its own: the main thread may be waiting on the other one.
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        plain = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store = dist.PrefixStore(f"attempt-{place.attempt}/heartbeat", plain)
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

    def silent(self) -> list[tuple[int, str]]:
        """Return (instance, host) of those that count no more, though nothing says that they are dead."""
        try:
            self._store.set(f"ending/{self._index}", "yes")
            before = self._numbers()
            time.sleep(4 * _BEAT_S)
            after = self._numbers()
            silent = [
                index
                for index in range(len(self._hellos))
                if index != self._index and before[index] == after[index] and not self._store.check([f"ending/{index}"])
            ]
        except (RuntimeError, dist.DistError):
            # The store itself is out of reach: the process that keeps it has ended, or is cut off.
            if self._refused():
                return []
            own = self._hellos[self._index]["host"]
            silent = [index for index, hello in enumerate(self._hellos) if hello["host"] != own]
        found = [index for index in silent if not self.is_dead(index)]
        for index in found:
            self._end_if_stopped(index)
        return [(index, str(self._hellos[index]["host"])) for index in found]

    def _refused(self) -> bool:
        """Return whether the host of the store answers that nobody listens there any more."""
        try:
            with socket.create_connection(self._store_address, timeout=2):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def _numbers(self) -> list[bytes]:
        keys = [f"beat/{index}" for index in range(len(self._hellos))]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def is_dead(self, index: int) -> bool:
        """Return True for an instance of this host whose process has ended: the launcher reports that."""
        return self._status(index) in (None, psutil.STATUS_ZOMBIE)

    def _end_if_stopped(self, index: int) -> None:
        """Kill an instance of this host that was stopped: it hears no signal, and the agent would wait for it."""
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
        while not self._stop.wait(_BEAT_S):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
            except (RuntimeError, dist.DistError):
                return
