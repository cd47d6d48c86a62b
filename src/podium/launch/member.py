"""An instance's side of a run whose instances come and go (`membership.py` has the rules, `crew.py` the launcher's
side): it leaves a group when the launcher names another, and enters that. Used through `distributed/regrouping.py`.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.distributed.regrouping import Group, Standing
from podium.errors import PodiumError
from podium.launch.board import Board
from podium.launch.environment import Place, own_cores
from podium.launch.heartbeat import Heartbeat
from podium.launch.lifeline import end_with_launcher, launcher_is_gone
from podium.launch.membership import NO_STATE, Beginning, Member, View, view_from
from podium.launch.sockets import give_up_after
from podium.topology import Topology, build_topology
from podium.ui import console

_POLL_S = 0.01
#: how long an instance waits for the launcher to notice a loss before it asks who is silent
_PATIENCE_S = 1.0


class GivenUp(PodiumError):
    """This instance was silent or asked to leave, and the others go on without it."""

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
        host: str,
    ) -> None:
        """`consoles`: copies of the first instance's standard output and error; `host`: the name of this host."""
        assert place.launch_folder is not None
        self._place, self._host = place, host
        self._board, self._store, self._heartbeat = Board(Path(place.launch_folder), place.attempt), store, heartbeat
        self._topology, self._timeout_s, self._consoles = topology, timeout_s, consoles
        self.joins = place.joins
        seats = () if place.joins else tuple(range(place.count))
        self._member = Member(place.index, View(-1 if place.joins else 0, seats), NO_STATE if place.joins else 0)
        self._beginning: Beginning | None = None

    def announce(self) -> None:
        if self._host != self._topology.hosts[0]:  # the others go on without a host whose launcher has ended
            end_with_launcher(os.environ)
        self._board.remove(f"bound-{self._member.seat}")
        self._board.put(f"able-{self._member.seat}", {"view": self._member.view.number})

    def stay(self) -> None:
        self._board.put(f"bound-{self._member.seat}", {})

    def withdraw(self) -> None:
        self._board.remove(f"able-{self._member.seat}")

    def has_changed(self) -> bool:
        if not self._board.has_changed("view"):
            return False
        return self._member.heed(self._newest()) != "stay"

    def has_lost(self) -> bool:
        newest = self._newest()
        return self._board.get("over") is not None or not set(self._member.view.seats) <= set(newest.seats)

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
                why = "has left the run" if self._has_left() else "was silent"
                number = member.view.seats.index(member.seat)
                raise GivenUp(f"instance {number} on {self._host} {why}, and the others go on without it: it has ended")
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
                    asked = True
                    self._tell_who_is_silent(newest)
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
        self._heartbeat.follow(hellos)
        hosts = Counter(str(hellos[seat]["host"]) for seat in view.seats)
        sizes, store = tuple(hosts.values()), dist.PrefixStore(f"view-{view.number}", self._store)
        try:
            instances = Instances.join(store, index, count, self._timeout_s, sizes, is_over=self._watch_over(view))
        except InstanceLost:
            return None
        instances.membership = self
        if len(sizes) > 1:
            give_up_after(self._timeout_s)
        self._take_cores(index, [hellos[seat] for seat in view.seats])
        member.begin(view, beginning)
        self._beginning = beginning
        topology = build_topology(self._topology.num_replicas, count, tuple(hosts), host_sizes=sizes)
        topology = replace(topology, host_cores=self._topology.host_cores)
        return Group(topology, instances, beginning.update, view.seats.index(beginning.source), beginning.again)

    def _take_cores(self, index: int, hellos: Sequence[Mapping[str, Any]]) -> None:
        """Take a share of this host's cores: there may be others on it than before, and it may be on another's."""
        here = [place for place, hello in enumerate(hellos) if hello["host"] == self._host]
        place = replace(self._place, index=index, local_index=here.index(index), local_count=len(here))
        os.sched_setaffinity(0, own_cores(place, [hello["cores"] for hello in hellos]))

    def _has_left(self) -> bool:
        left = (self._board.get("view") or {}).get("left", ())
        return isinstance(left, list) and self._member.seat in left

    def _hello(self, seat: int) -> Mapping[str, Any]:
        facts: dict[str, Any] = json.loads(self._store.get(f"hello/{seat}"))
        return facts

    def _check_run(self) -> None:
        if self._board.get("over") is not None or launcher_is_gone(os.environ):
            raise InstanceLost(None, "the run has ended or restarts")

    def _tell_who_is_silent(self, view: View) -> None:
        if silent := self._heartbeat.silent_seats():
            self._board.put(f"silent-{self._member.seat}", {"view": view.number, "seats": silent})

    def _watch_over(self, view: View) -> Callable[[], bool]:
        """Return a function that says whether a view that is being entered will not come about; where that takes
        long, it also tells who is silent."""
        began, asked = time.monotonic(), False

        def is_over() -> bool:
            nonlocal asked
            if not asked and time.monotonic() - began > _PATIENCE_S:
                asked = True
                self._tell_who_is_silent(view)
            return self._is_over(view)

        return is_over

    def _is_over(self, view: View) -> bool:
        return self._board.get("over") is not None or self._newest().number > view.number

    def _newest(self) -> View:
        facts = self._board.get("view")
        try:
            return self._member.view if facts is None else view_from(facts)
        except (KeyError, TypeError, ValueError):
            return self._member.view
