"""An instance's side of a run whose instances come and go (`membership.py` has the rules, `crew.py` the launcher's
side): it leaves a group when the launcher names another, and enters that. Used through `distributed/regrouping.py`.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.distributed.regrouping import Group, Standing
from podium.errors import PodiumError
from podium.launch.board import Board
from podium.launch.environment import Place
from podium.launch.heartbeat import Heartbeat
from podium.launch.lifeline import launcher_is_gone
from podium.launch.membership import NO_STATE, Beginning, Member, View, view_from
from podium.topology import Topology, build_topology
from podium.ui import console

_POLL_S = 0.01
#: how long an instance waits for the launcher to notice a loss before it asks who is silent
_PATIENCE_S = 1.0


class GivenUp(PodiumError):
    """This instance was silent, and the others go on without it."""

    exit_code = 72


class CrewMember:
    """This process as a member; keeps the group that it is in."""

    def __init__(
        self,
        place: Place,
        store: dist.Store,
        heartbeat: Heartbeat,
        topology: Topology,
        timeout_s: float,
        consoles: tuple[int, int],
        cores: tuple[int, ...],
    ) -> None:
        """`consoles`: copies of the first instance's standard output and error; `cores`: those that this one has."""
        assert place.launch_folder is not None
        self._board, self._store, self._heartbeat = Board(Path(place.launch_folder), place.attempt), store, heartbeat
        self._topology, self._timeout_s, self._consoles = topology, timeout_s, consoles
        self.joins = place.joins
        seats = () if place.joins else tuple(range(place.count))
        self._member = Member(place.index, View(-1 if place.joins else 0, seats), NO_STATE if place.joins else 0)
        self._beginning: Beginning | None = None
        self._cores = cores

    def announce(self) -> None:
        self._board.put(f"able-{self._member.seat}", {"view": self._member.view.number})

    def withdraw(self) -> None:
        self._board.remove(f"able-{self._member.seat}")

    def has_changed(self) -> bool:
        if not self._board.has_changed("view"):
            return False
        return self._member.heed(self._newest()) != "stay"

    def updated(self) -> None:
        self._member.recorded_by = None

    def recorded(self) -> None:
        self._member.recorded_by = self._member.view.lead

    def has_state(self) -> None:
        assert self._beginning is not None
        self._member.has_state(self._beginning)

    def speak(self) -> None:
        for stream, copy in zip((1, 2), self._consoles, strict=True):
            os.dup2(copy, stream)
        console.speak_again()

    def cannot(self, reason: str) -> None:
        self._board.put(f"cannot-{self._member.seat}", {"reason": reason})

    def next_group(self, standing: Standing) -> Group:
        """Leave the group and enter the next one that comes about; GivenUp where this instance is not in it."""
        member, began, asked = self._member, time.monotonic(), False
        member.update, member.whole = standing.update, standing.whole
        tried = member.view.number
        if self.joins and standing.update == NO_STATE:
            self._board.put(f"come-{member.seat}", {})
        while True:
            self._check_run()
            newest = self._newest()
            heed = member.heed(newest)
            if heed == "end" and not self.joins:
                raise GivenUp(
                    f"instance {member.view.seats.index(member.seat)} on {self._topology.hosts[0]} was silent, and the "
                    "others go on without it: it has ended"
                )
            if heed == "leave" and newest.number > tried:
                tried = newest.number
                group = self._entered(newest)
                if group is not None:
                    self.joins = False
                    return group
                began = time.monotonic()
                continue
            waited = time.monotonic() - began
            if not self.joins:
                if waited > _PATIENCE_S and not asked:
                    asked, silent = True, self._heartbeat.silent_seats()
                    if silent:
                        self._board.put(f"silent-{member.seat}", {"view": newest.number, "seats": silent})
                elif waited > self._timeout_s:
                    raise InstanceLost(None, f"no other group in {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def _entered(self, view: View) -> Group | None:
        """Report, and enter a view; None where another one has come meanwhile."""
        member = self._member
        self._board.put(f"report-{member.seat}", asdict(member.report(view)))
        while (facts := self._board.get(f"begin-{view.number}")) is None:
            self._check_run()
            if self._newest().number > view.number:
                return None
            time.sleep(_POLL_S)
        beginning = Beginning(**facts)
        hellos = {seat: self._hello(seat) for seat in view.seats}
        index, count = view.seats.index(member.seat), len(view.seats)
        store = dist.PrefixStore(f"view-{view.number}", self._store)
        try:
            instances = Instances.join(
                store, index, count, self._timeout_s, (count,), is_over=lambda: self._is_over(view)
            )
        except InstanceLost:
            return None
        instances.membership = self
        self._heartbeat.follow(hellos)
        os.sched_setaffinity(0, self._cores)  # it may be on another's, by turns
        member.begin(view, beginning)
        self._beginning = beginning
        topology = self._topology
        topology = replace(build_topology(topology.num_replicas, count, topology.hosts), host_cores=topology.host_cores)
        return Group(topology, instances, beginning.update, view.seats.index(beginning.source), beginning.again)

    def _hello(self, seat: int) -> Mapping[str, Any]:
        facts: dict[str, Any] = json.loads(self._store.get(f"hello/{seat}"))
        return facts

    def _check_run(self) -> None:
        if self._board.get("over") is not None or launcher_is_gone(os.environ):
            raise InstanceLost(None, "the run has ended or restarts")

    def _is_over(self, view: View) -> bool:
        return self._board.get("over") is not None or self._newest().number > view.number

    def _newest(self) -> View:
        facts = self._board.get("view")
        try:
            return self._member.view if facts is None else view_from(facts)
        except (KeyError, TypeError, ValueError):
            return self._member.view
