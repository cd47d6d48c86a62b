"""What the launchers of several hosts tell each other while instances run: who lost one, who has ended. A single host
has nobody to tell."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from podium.launch.plan import LaunchPlan

#: set by a host that was started again, while the others are still in the launch that it was lost from
REPLACED = "replaced"
#: how often a host looks what the others have said
_LOOK_S = 1.0
#: how long the first host stays for the others to hear that the run has ended
_FAREWELL_S = 5.0


class HostLost(Exception):
    """Another host did not answer in time, or the connection to it is broken."""


class EndedElsewhere(Exception):
    """Another host has ended the run, for a reason that no restart would change."""


class Agreement:
    """Keeps the attempts of all hosts in step: a run starts again everywhere or nowhere."""

    def __init__(self, plan: LaunchPlan, store: dist.Store | None, timeout_s: float) -> None:
        """Take the store where the hosts meet; None where there is one host only."""
        self._host, self._hosts, self._keeps_store = plan.host, plan.topology.hosts, plan.keeps_store
        self._store, self._timeout_s = store, timeout_s
        self._next_look = 0.0

    def meet(self, attempt: int, is_stopped: Callable[[], bool]) -> None:
        """Return once all hosts are ready to start this attempt, or a signal came."""
        store = self._store
        if store is None:
            return
        keys = [f"ready/{attempt}/{host}" for host in self._hosts]
        deadline = time.monotonic() + self._timeout_s
        try:
            store.set(f"ready/{attempt}/{self._host}", "yes")
            while not is_stopped() and not store.check(keys):
                self._heed(store)
                if time.monotonic() > deadline:
                    raise HostLost
                with suppress(dist.DistStoreError):
                    store.wait(keys, timedelta(seconds=_LOOK_S))
        except dist.DistNetworkError:
            raise HostLost from None

    def report_loss(self, attempt: int) -> None:
        """Have all hosts start again."""
        self._set(f"lost/{attempt}")

    def is_lost(self, attempt: int) -> bool:
        """Return whether another host has lost an instance; looks now and then only."""
        if self._store is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        try:
            self._heed(self._store)
            return self._store.check([f"lost/{attempt}"])
        except dist.DistError:
            raise HostLost from None

    @staticmethod
    def _heed(store: dist.Store) -> None:
        if store.check([REPLACED]):
            raise HostLost
        if store.check(["over"]):
            raise EndedElsewhere

    def leave_out(self, hosts: Iterable[str]) -> None:
        """Wait no more for these, which the run goes on without."""
        self._hosts = tuple(host for host in self._hosts if host not in set(hosts))

    def finish(self) -> None:
        """Leave after a good end; the first host stays until all have, as the others meet at it."""
        self._leave(self._timeout_s)

    def end(self, *, in_order: bool = False) -> None:
        """End the run on all hosts; where this host's instances have ended `in_order`, those of others will, too."""
        with suppress(HostLost):
            self._set("over")
            self._leave(self._timeout_s if in_order else _FAREWELL_S)

    def _leave(self, timeout_s: float) -> None:
        self._set(f"left/{self._host}")
        if self._store is not None and self._keeps_store:
            with suppress(dist.DistError):
                self._store.wait([f"left/{host}" for host in self._hosts], timedelta(seconds=timeout_s))

    def _set(self, key: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, "yes")
            except dist.DistError:
                raise HostLost from None
