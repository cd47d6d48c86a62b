"""How the launchers of several hosts meet, before any instance starts. Called by `agent.py`."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from podium.errors import UserError
from podium.launch.agreement import REPLACED
from podium.launch.meeting import Meeting
from podium.launch.plan import LaunchPlan
from podium.launch.service import MeetingService, listen_at, listen_in
from podium.launch.ssh import RemoteHost
from podium.launch.store import MeetingStore
from podium.recipe.sections.launch import LaunchSection
from podium.ui.console import say

_MAX_CLOCK_GAP_S = 3.0
#: How often a host that waits for others checks whether one of them has failed.
_CHECK_S = 0.25


class HostMissing(UserError):
    """A host has not come, or has gone: no mistake where hosts are started again, each at its time."""


def open_service(meeting: Meeting, patience_s: float = 0.0) -> MeetingService:
    """Open the service where a launch meets, on the host that keeps it; `patience_s`: for the name service to know
    its name."""
    if meeting.folder is not None:
        return MeetingService(listen_in(meeting.folder), meeting.secret)
    try:
        own = _resolved(meeting.address, patience_s)
    except OSError:
        raise HostMissing(
            f"{meeting.address}, where the hosts meet, cannot be resolved: correct the name service or /etc/hosts"
        ) from None
    try:
        return MeetingService(listen_at(own, meeting.port), meeting.secret)
    except OSError as error:
        raise UserError(
            f"port {meeting.port} of {own} cannot be used ({error.strerror}): choose another with launch.port"
        ) from None


def _resolved(name: str, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return socket.gethostbyname(name)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CHECK_S)


def open_store(plan: LaunchPlan, meeting: Meeting, section: LaunchSection) -> MeetingStore:
    """Return this host's connection to where the hosts meet."""
    if not plan.keeps_store:
        say(f"joining {meeting} as {plan.host}")
    try:
        return MeetingStore(meeting, section.timeout)
    except dist.DistError:
        raise HostMissing(f"{meeting}, where the hosts meet, did not answer within {section.timeout:g} s") from None


def assemble_hosts(plan: LaunchPlan, section: LaunchSection, store: dist.Store, others: Sequence[RemoteHost]) -> None:
    """Wait for all hosts, then compare their clocks: logs and notes of several hosts are read side by side."""
    hosts = plan.topology.hosts
    try:
        if plan.started_again:
            _replace_lost_host(plan, store)
        store.set(f"joined/{plan.host}", "yes")
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
        raise HostMissing(f"{gone} ended before all hosts had met; see its messages") from None
    except UserError as error:
        if plan.keeps_store:
            store.set("ended", str(error))
        raise
    check_clocks(clocks)


def _replace_lost_host(plan: LaunchPlan, store: dist.Store) -> None:
    """End a launch that this host was lost from, and that has not noticed yet: all hosts begin anew together."""
    if store.add(f"arrived/{plan.host}", 1) > 1:
        store.set(REPLACED, "yes")
        raise HostMissing(f"the other hosts are still in the launch that {plan.host} was lost from; they end it now")


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
            raise HostMissing(f"{late} not joined within {section.timeout:g} s{advice}")


def check_clocks(clocks: Mapping[str, float]) -> None:
    """Raise UserError when two hosts' clocks are too far apart to compare the times in their logs."""
    late, early = max(clocks, key=lambda host: clocks[host]), min(clocks, key=lambda host: clocks[host])
    gap = clocks[late] - clocks[early]
    if gap > _MAX_CLOCK_GAP_S:
        raise UserError(f"the clocks of {late} and {early} are {gap:.0f} s apart: synchronise them, e.g. with NTP")
