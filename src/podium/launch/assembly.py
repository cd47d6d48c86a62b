"""How the launchers of several hosts meet, before any instance starts. Called by `agent.py`."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from podium.errors import UserError
from podium.launch.plan import LaunchPlan
from podium.launch.sockets import listening_store
from podium.launch.ssh import RemoteHost
from podium.recipe.sections.launch import LaunchSection
from podium.ui.console import say

_MAX_CLOCK_GAP_S = 3.0
#: How often a host that waits for others checks whether one of them has failed.
_CHECK_S = 0.25


def open_store(plan: LaunchPlan, section: LaunchSection) -> dist.TCPStore:
    """Return the store where hosts meet: the first host opens it, the others connect to it."""
    address, port = plan.meeting
    if plan.keeps_store:
        own = "127.0.0.1" if plan.alone else socket.gethostbyname(address)
        try:
            return listening_store(own, port)
        except OSError as error:
            raise UserError(
                f"port {port} of {own} cannot be used ({error.strerror}): choose another with launch.port"
            ) from None
    say(f"joining {address}:{port} as {plan.host}")
    try:
        timeout = timedelta(seconds=section.timeout)
        return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError):
        raise UserError(
            f"{address}:{port}, where the hosts meet, did not answer within {section.timeout:g} s"
        ) from None


def assemble_hosts(plan: LaunchPlan, section: LaunchSection, store: dist.Store, others: Sequence[RemoteHost]) -> None:
    """Wait for all hosts, then compare their clocks: torch's agents believe hosts with another time to be dead."""
    if plan.alone:
        return
    hosts = plan.topology.hosts
    store.set(f"joined/{plan.host}", "yes")
    try:
        _wait_for_hosts(plan, section, store, others)
        # The last host to join releases all of them, so all read their clocks at the same moment.
        store.set(f"clock/{plan.host}", str(time.time()))
        store.wait([f"clock/{host}" for host in hosts], timedelta(seconds=section.timeout))
        clocks = {host: float(store.get(f"clock/{host}")) for host in hosts}
        store.set(f"read/{plan.host}", "yes")
        if plan.keeps_store:
            store.wait([f"read/{host}" for host in hosts], timedelta(seconds=section.timeout))
    except (RuntimeError, dist.DistError):
        gone = "another host" if plan.keeps_store else hosts[0]
        raise UserError(f"{gone} ended before all hosts had met; see its messages") from None
    except UserError as error:
        if plan.keeps_store:
            store.set("ended", str(error))
        raise
    check_clocks(clocks)


def _wait_for_hosts(plan: LaunchPlan, section: LaunchSection, store: dist.Store, others: Sequence[RemoteHost]) -> None:
    """Wait until all have joined; raise UserError as soon as it is known that one will not."""
    keys = {host: f"joined/{host}" for host in plan.topology.hosts}
    deadline = time.monotonic() + section.timeout
    missing = list(keys)
    while missing:
        with suppress(RuntimeError, dist.DistError):  # also when the store is gone, which the next check raises
            store.wait(list(keys.values()), timedelta(seconds=_CHECK_S))
        missing = [host for host, key in keys.items() if not store.check([key])]
        for other in others:
            other.joined = other.host not in missing
            other.check()
        if missing and store.check(["ended"]):
            raise UserError(store.get("ended").decode())
        if missing and time.monotonic() > deadline:
            late = f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'}"
            advice = "" if others else ": start the same command there with --join"
            raise UserError(f"{late} not joined within {section.timeout:g} s{advice}")


def check_clocks(clocks: Mapping[str, float]) -> None:
    """Raise UserError when two hosts' clocks are further apart than torch's agents tolerate."""
    late, early = max(clocks, key=lambda host: clocks[host]), min(clocks, key=lambda host: clocks[host])
    gap = clocks[late] - clocks[early]
    if gap > _MAX_CLOCK_GAP_S:
        raise UserError(f"the clocks of {late} and {early} are {gap:.0f} s apart: synchronise them, e.g. with NTP")
