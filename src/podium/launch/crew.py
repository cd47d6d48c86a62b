"""The first host's launcher, where instances come and go: it notices who is lost, replaces them, takes in those that
come, and says who trains from which update on. `membership.py` has the rules, `member.py` the side of the instances,
`relay.py` that of other hosts, `requests.py` what people ask for.

For instances that hold the whole state each, or copies of one another's shares; others restart from the last
checkpoint, and stay as many as they are.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from podium.launch.between_hosts import PULSE_S, SILENT_S, OtherHosts, Up
from podium.launch.board import Board
from podium.launch.everyone import Everyone, Start
from podium.launch.failures import FINAL, Failure, find_cause
from podium.launch.leaving import seats_to_take, why_needed
from podium.launch.membership import Coordinator, report_from
from podium.launch.plan import Limits
from podium.launch.processes import LocalInstances
from podium.launch.requests import Requests
from podium.launch.roster import HOME, Roster
from podium.ui.console import say, warn

_BOUND = (
    "its instances cannot come and go, as each holds a part of the state or sends what the others need: stop the run, "
    "and `podium resume` it with another --instances"
)


class Crew:
    """The instances of one attempt, by their seats."""

    def __init__(
        self,
        board: Board,
        hosts: Mapping[int, str],
        home: str,
        instances: LocalInstances,
        limits: Limits,
        timeout_s: float,
        start: Start,
        others: OtherHosts | None = None,
    ) -> None:
        """Look after instances that are about to be started at these seats of these hosts; `start` starts another one
        on this host, `home`; `others`: where the run may have other hosts."""
        self._everyone = Everyone(board, instances, start, others)
        self._limits, self._timeout_s = limits, timeout_s
        self._coordinator = Coordinator(hosts, home, limits.can_train)
        self._roster = Roster(hosts, home)
        self._num_first, self._first_hosts = len(hosts), set(hosts.values()) - {home}
        self._requests = Requests(board)
        self._coming: set[int] = set()
        #: the seats of the newest view that has begun
        self._training: tuple[int, ...] = self._coordinator.view.seats
        self._given_up: set[int] = set()
        self._left: set[int] = set()
        self._told_of_view, self._since = 0, time.monotonic()
        #: since when an instance is lost that the others, as far as they have said, cannot go on without
        self._lost_since: float | None = None
        #: why the run has to restart, where that is known
        self.reason = ""
        #: whether all instances are about to restart
        self.restarts = False
        #: hosts that were lost, or have left
        self.gone: set[str] = set()
        #: whether there were too few instances for too long
        self.is_given_up = False
        self._everyone.put("view", self._view_facts())

    # --- what whoever keeps it asks ---------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether all instances of the view train."""
        view, able = self._coordinator.view, self._everyone.notes("able")
        return all(able.get(seat, {}).get("view") == view.number for seat in view.seats)

    @property
    def is_changing(self) -> bool:
        """Whether instances wait for a view to begin: then every hundredth of a second counts."""
        return self._coordinator.view.number > 0 and self._coordinator.beginning is None

    @property
    def has_ended_elsewhere(self) -> bool:
        """Whether another host has said why the run ends."""
        return any(note.final for note in self._everyone.failures_elsewhere())

    def has_ended(self) -> bool:
        """Return whether all instances that trained to the end have ended well; others may still be on their way."""
        codes = self._everyone.codes()
        return all(codes.get(seat) == 0 for seat in self._training if seat not in self._given_up)

    def look(self, num_lost: int, most: int, *, stopping: bool = False) -> int | None:
        """See to whatever has happened. Return how many losses the run goes on after, None where it cannot. `num_lost`:
        how many there were before, of `most` that may be; `stopping`: whether it is to save and end."""
        try:
            lost = self._look(num_lost, most, stopping=stopping)
            self._everyone.tell()
        except dist.DistError:
            self.reason = "the service where the hosts meet does not answer"
            return None
        return lost

    def close(self) -> None:
        """End those that do not belong to the run any more, or not yet."""
        self._everyone.put("over", {"again": self.restarts})
        self._everyone.close()
        for seat in self._given_up | self._coming | (set(self._coordinator.view.seats) - set(self._training)):
            self._everyone.kill(seat)

    # --- in turn ----------------------------------------------------------------------------------------------------

    def _look(self, num_lost: int, most: int, *, stopping: bool) -> int | None:
        self._everyone.look()
        every = self._everyone.codes()
        codes = {seat: code for seat, code in every.items() if code}
        if 0 in every.values() and self._is_over():
            self._everyone.put("over", {"again": False})  # those that wait for another view end, too
            return None if codes else 0
        for seat in [] if stopping else sorted(seat for seat in self._coming if every.get(seat) == 0):
            self._turn_away(seat)
        if not codes and not self.is_changing and self._everyone.is_quiet(self._timeout_s):
            return 0
        for seat in self._given_up & codes.keys():
            self._say_goodbye(seat)
            del codes[seat]  # it was counted when it was given up
        view, lost = self._coordinator.view, dict[int, Failure]()
        for seat in sorted(codes.keys() - self._given_up):
            if codes[seat] in FINAL and seat in view.seats:
                return None
            lost[seat] = self._failure(seat, codes[seat])
        lost |= self._silent(view.seats)
        lost_hosts = self._lost_hosts(lost)
        events = [[seat] for seat in lost if self._roster.arrival_of(seat) not in lost_hosts]
        events += [self._roster.seats_of(number) for number in lost_hosts]
        reasons = list(self._everyone.notes("cannot").values())
        gone = {seat for seats in events for seat in seats}
        can_spare = self._can_spare(gone)
        if not can_spare and not reasons and self._may_yet_hear(gone):
            return 0
        if num_lost + len(events) > most or reasons or not can_spare:
            facts = next(iter(reasons), {})
            known = [failure.sentence() for failure in lost.values() if failure.exit_code]
            self.reason = str(facts.get("reason", ""))[:300] or next(iter(known), "")
            return None
        self._lost_since = None
        for number, seats in enumerate(events, num_lost + 1):
            self._lose(seats, lost, lost_hosts, f"{number} of {most}")
        self._welcome_hosts()
        self._heed_requests()
        self._hear(stopping=stopping)
        return None if self._coordinator.is_hopeless else len(events)

    def _is_over(self) -> bool:
        """Return whether an instance has ended for a reason that no other instances would change."""
        seats = self._coordinator.view.seats
        return any(note.final and note.instance in seats for note in self._everyone.failures())

    def _begin(self, arrival: int) -> int:
        """Have an instance started on a host; return its seat."""
        seat, place = self._roster.new_seat(arrival)
        self._coming.add(seat)
        self._everyone.start(arrival, seat, place)
        return seat

    # --- those that are lost, or leave ------------------------------------------------------------------------------

    def _can_spare(self, lost: Iterable[int]) -> bool:
        """Return whether the others can go on: they train, or wait to."""
        able = self._everyone.notes("able")
        left = set(self._coordinator.view.seats) - set(lost)
        if left == set(self._coordinator.view.seats):
            return True
        return bool(left) and all(seat in able or seat >= self._num_first for seat in left)

    def _may_yet_hear(self, lost: set[int]) -> bool:
        """Return whether instances of other hosts may have begun to train, and their word of it be on its way."""
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        told = self._everyone.notes("able").keys() | self._everyone.notes("bound").keys()
        untold = set(self._coordinator.view.seats) - lost - told
        return (
            bool(untold)
            and all(self._roster.arrival_of(seat) != HOME for seat in untold)
            and now - self._lost_since < SILENT_S
        )

    def _failure(self, seat: int, code: int) -> Failure:
        notes, host = [note for note in self._everyone.failures() if note.instance == seat], self._roster.host_of(seat)
        found = find_cause(notes, {seat: code}, host)
        return found or Failure(seat, host, code, f"ended with exit code {code}")

    def _silent(self, seats: tuple[int, ...]) -> dict[int, Failure]:
        """Return those that others have heard nothing from, and those that do not answer while a view is to begin."""
        found = set()
        for note in self._everyone.notes("silent").values():
            if note.get("view") == self._coordinator.view.number:
                with suppress(TypeError):
                    found |= set(note.get("seats", ()))
        # Those that wait for a host to connect hear of another view only when that has taken too long.
        patience_s = self._timeout_s * (1 if len(self._roster.present()) == 1 else 2)
        if self.is_changing and time.monotonic() - self._since > patience_s:
            found |= self._coordinator.missing
        for number in self._everyone.silent_arrivals(self._timeout_s):
            found |= set(self._roster.seats_of(number))
        return {seat: Failure(seat, self._roster.host_of(seat), 0, "is silent") for seat in found & set(seats)}

    def _lost_hosts(self, lost: Mapping[int, Failure]) -> list[int]:
        """Return the arrivals that are lost with their instances: nothing is heard of these, nor of their launchers."""
        ups, quiet = self._everyone.ups(), self._everyone.silent_arrivals()
        silent = {self._roster.arrival_of(seat) for seat, failure in lost.items() if failure.exit_code == 0}
        newest = {ups[number].host: number for number in sorted(ups)}
        back = {number for number, up in ups.items() if newest[up.host] != number}
        return sorted(quiet & (silent | back))

    def _lose(self, seats: list[int], lost: Mapping[int, Failure], lost_hosts: list[int], counted: str) -> None:
        """Go on without an instance, which is replaced, or without a host."""
        if seats and (number := self._roster.arrival_of(seats[0])) not in lost_hosts:
            self._take_leave(seats[0], lost[seats[0]], counted)
            self._coordinator.remove(seats)
            if number == HOME or number in self._everyone.ups():
                self._requests.replaced(seats[0], self._begin(number))
            return
        for number in [one for one in lost_hosts if self._roster.seats_of(one) == seats]:
            host = self._roster.host_named(number)
            warn(f"heard nothing from {host}; the others go on without it ({counted})")
            self._dismiss(number, f"the run goes on without {host}, which was silent: come again with `podium join`")
        self._coordinator.remove(seats)

    def _dismiss(self, number: int, why: str) -> None:
        """Let a host go, with all its instances."""
        for seat in self._roster.seats_of(number):
            self._forget(seat)
        self.gone.add(self._roster.host_named(number))
        self._everyone.refuse(number, why)

    def _take_leave(self, seat: int, failure: Failure, counted: str) -> None:
        view, host = self._coordinator.view, self._roster.host_of(seat)
        number = view.seats.index(seat) if seat in view.seats else self._roster.place_of(seat)
        if failure.exit_code == 0:
            sentence = f"heard nothing from instance {number} on {host}"
            if seat == view.lead:
                self._everyone.kill(seat)  # nothing else keeps it from writing to the run's folder
            else:
                self._given_up.add(seat)
        else:
            sentence = replace(failure, instance=number).sentence()
            self._forget(seat)
        what = "the others go on without it" if seat in view.seats else "it was to replace another"
        warn(f"{sentence}; {what} ({counted})")

    def _forget(self, seat: int) -> None:
        self._coming.discard(seat)
        self._roster.forget(seat)
        self._everyone.forget(seat)

    def _turn_away(self, seat: int) -> None:
        """Go on without one that was to come, and has ended for a reason that would end others in its place, too."""
        number, why = self._roster.arrival_of(seat), self._failure(seat, 0).message
        warn(f"an instance that was to come on {self._roster.host_of(seat)} cannot: {why}")
        self._requests.give_up(seat, why)
        self._forget(seat)
        if number != HOME and not self._roster.seats_of(number):
            self._dismiss(number, why)

    def _say_goodbye(self, seat: int) -> None:
        """Tell how an instance that was given up has ended."""
        for note in self._everyone.failures():
            if note.instance == seat and seat not in self._left:
                say(note.message)
        self._given_up.discard(seat)
        self._forget(seat)

    # --- those that come, or are asked to ---------------------------------------------------------------------------

    def _num_there(self) -> int:
        return len(self._coordinator.view.seats) + len(self._coming)

    def _welcome_hosts(self) -> None:
        """Take in hosts that have come since: those that the run began with, and others, as far as there is room."""
        for number, up in self._everyone.ups().items():
            if self._roster.knows(number) or self._is_there_twice(number, up):
                continue
            self._roster.welcome(number, up.host, up.seats)
            if up.seats:
                continue
            count = min(up.wants, self._limits.most - self._num_there())
            if count > 0:
                say(f"{up.host} has come, with {count} instance{'' if count == 1 else 's'}")
            else:
                self._everyone.refuse(number, self._full())
            for _ in range(count):
                self._begin(number)

    def _is_there_twice(self, number: int, up: Up) -> bool:
        """Return whether another host of this name takes part; once it is clear that it is not about to be found lost,
        the new one is turned away."""
        twice = up.host == self._roster.home
        twice |= any(other < number and one.host == up.host for other, one in self._everyone.ups().items())
        if twice and up.pulse * PULSE_S > 3 * SILENT_S:
            self._everyone.refuse(number, f"{up.host} takes part already: call this host by another name")
        return twice

    def _full(self) -> str:
        return f"the run has {self._num_there()} instances, and takes {self._limits.most} at most"

    def _heed_requests(self) -> None:
        """Do what people ask for: more instances, or fewer."""
        if not self._can_heed():
            return
        for request in self._requests.new():
            if self._is_bound:
                self._requests.refuse(request, _BOUND)
            elif request.do == "join":
                room = self._limits.most - self._num_there()
                if request.count > room:
                    self._requests.refuse(request, self._full())
                else:
                    self._requests.await_(request, come={self._begin(HOME) for _ in range(request.count)})
            elif (seats := self._seats_to_take(request.host, request.count)) is None:
                self._requests.refuse(request, self._needed(request.host, request.count))
            else:
                self._requests.await_(request, gone=self._let_go(seats, request.host, whole=request.count < 0))
                if not seats:
                    self._requests.answer(self._training, f"{request.host} has left the run")
            if not self._can_heed():
                return
        for number, up in self._everyone.ups().items():
            for count in up.leaves[self._roster.num_heeded(number) :]:
                self._roster.heed(number)
                seats = self._seats_to_take(up.host, count)
                if seats is None:
                    warn(f"{up.host} asked to leave, but {self._needed(up.host, count)}")
                else:
                    self._let_go(seats, up.host, whole=count < 0)

    @property
    def _is_bound(self) -> bool:
        """Whether an instance has said that it cannot go on with others than these."""
        return bool(self._everyone.notes("bound"))

    def _can_heed(self) -> bool:
        """Return whether it is known that instances may come and go and, where each has a share of the state, whether
        the shares are with those that are there."""
        knows = self._is_bound or self._coordinator.is_short or self.is_settled
        return knows or (self._coordinator.view.number > 0 and not self._limits.leave_in_turn)

    def _needed(self, host: str, count: int) -> str:
        """Return why so many instances cannot be taken away."""
        if self._is_bound:
            return _BOUND
        return why_needed(self._roster, self._coordinator.view.seats, self._limits, host, count)

    def _seats_to_take(self, host: str, count: int) -> set[int] | None:
        if self._is_bound:
            return None
        return seats_to_take(self._roster, self._coordinator.view.seats, self._limits, host, count)

    def _let_go(self, seats: set[int], host: str, *, whole: bool) -> set[int]:
        """Go on without these seats, which have been asked to leave, and without their host if it is `whole`."""
        self._left |= seats
        self._given_up |= seats
        self._coordinator.remove(seats)
        if whole:
            for number in [one for one in self._roster.arrivals() if self._roster.host_named(one) == host]:
                self._given_up -= seats
                self._dismiss(number, f"{host} has left the run")
        return seats

    # --- views ------------------------------------------------------------------------------------------------------

    def _view_facts(self) -> dict[str, Any]:
        return {**asdict(self._coordinator.view), "left": sorted(self._left)}

    def _hear(self, *, stopping: bool) -> None:
        """Take in what instances say; tell them who trains, and from which update on."""
        coordinator, before = self._coordinator, self._coordinator.beginning
        self._take_in()
        view = coordinator.view
        if view.number > self._told_of_view:
            self._told_of_view, self._since = view.number, time.monotonic()
            self._everyone.put("view", self._view_facts())
        for seat, facts in self._everyone.notes("report").items():
            with suppress(KeyError, TypeError, ValueError):
                coordinator.hear(report_from(seat, facts))
        self._end_if_short(stopping=stopping)
        beginning = coordinator.beginning
        if beginning is not None and beginning is not before and not coordinator.is_hopeless:
            self._training = view.seats
            self._everyone.put(f"begin-{view.number}", asdict(beginning))
            count = len(view.seats)
            who = "1 instance trains" if count == 1 else f"{count} instances train"
            hosts = {self._roster.host_of(seat) for seat in view.seats}
            where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
            say(f"{who}{where} from update {beginning.update} on")
            self._requests.answer(view.seats, f"{who}{where} from update {beginning.update} on")

    def _take_in(self) -> None:
        """Let those in that have come, as many as can train; where too few are there, before the view begins."""
        come = sorted(self._coming & self._everyone.notes("come").keys())
        waits = self._coordinator.is_short and self._coordinator.view.number > 0
        if not come or not (waits or self.is_settled):
            return
        there = len(self._coordinator.view.seats)
        while come and not waits and not self._limits.can_train(there + len(come)):
            come.pop()
        self._coordinator.add({seat: self._roster.host_of(seat) for seat in come})
        self._coming -= set(come)

    def _end_if_short(self, *, stopping: bool) -> None:
        """Where too few have waited for too long, have them save and end; so where they are asked to stop."""
        if not (self.is_changing and self._coordinator.is_short):
            return
        if not self._coming and time.monotonic() - self._since > self._timeout_s and not self.is_given_up:
            self.is_given_up = True
            few = self._limits.too_few(len(self._coordinator.view.seats))
            warn(f"{few}: nobody has come for {self._timeout_s:g} s, so the run saves and stops")
        if stopping or self.is_given_up:
            self._coordinator.allow(bool)
