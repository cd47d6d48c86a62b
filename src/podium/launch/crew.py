"""The launcher's side of instances that come and go: it notices who is lost, replaces them, and says who trains from
which update on. `membership.py` has the rules, `member.py` the side of the instances.

For the instances of one host that hold the whole state each and share memory; others restart from the last checkpoint.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from podium.launch.board import Board
from podium.launch.failures import FINAL, Failure, clear_failure, find_cause, read_failures
from podium.launch.membership import Coordinator, Report
from podium.launch.processes import LocalInstances
from podium.ui.console import say, warn

#: starts a process: its seat, and which of the host's places for instances it takes
Start = Callable[[int, int], None]


class Crew:
    """The instances of one attempt, by their seats."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        host: str,
        instances: LocalInstances,
        count: int,
        timeout_s: float,
        start: Start,
    ) -> None:
        """Look after `count` instances that are about to be started; `start` starts another one."""
        self._folder, self._host, self._instances, self._start = folder, host, instances, start
        self._timeout_s = timeout_s
        self._board = Board(folder, attempt)
        self._board.open()
        self._coordinator = Coordinator(range(count))
        self._count, self._next_seat = count, count
        self._place_of = {seat: seat for seat in range(count)}  # of the host's places for instances
        self._coming: set[int] = set()
        #: the seats of the newest view that has begun
        self._training: tuple[int, ...] = tuple(range(count))
        self._given_up: set[int] = set()
        self._told_of_view, self._since = 0, time.monotonic()
        #: why the run has to restart, where that is known
        self.reason = ""
        self._board.put("view", asdict(self._coordinator.view))

    @property
    def is_settled(self) -> bool:
        """Whether all instances of the view train."""
        view, able = self._coordinator.view, self._board.all("able")
        return all(able.get(seat, {}).get("view") == view.number for seat in view.seats)

    @property
    def is_changing(self) -> bool:
        """Whether instances wait for a view to begin: then every hundredth of a second counts."""
        return self._coordinator.view.number > 0 and self._coordinator.beginning is None

    def has_ended(self) -> bool:
        """Return whether all instances that trained to the end have ended well; others may still be on their way."""
        codes = self._instances.exit_codes()
        return all(codes.get(seat) == 0 for seat in self._training)

    def look(self, num_lost: int, most: int) -> int | None:
        """See to whatever has happened. Return how many instances were lost and the run goes on without, None where it
        cannot. `num_lost`: how many were lost before, of `most` that may be."""
        every = self._instances.exit_codes()
        codes = {seat: code for seat, code in every.items() if code}
        if 0 in every.values() and self._is_over():
            self._board.put("over", {})  # those that wait for another view end, too
            return None if codes else 0
        if not codes and not self.is_changing and self._board.is_quiet():
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
        if num_lost + len(lost) > most or self._board.all("cannot") or not self._can_spare(lost):
            facts = next(iter(self._board.all("cannot").values()), {})
            self.reason = str(facts.get("reason", ""))[:300]
            return None
        for number, (seat, failure) in enumerate(lost.items(), num_lost + 1):
            self._take_leave(seat, failure, f"{number} of {most}")
        self._coordinator.remove(lost)
        for seat in lost:
            self._replace(seat)
        self._hear()
        if self._coordinator.is_hopeless:
            return None
        return len(lost)

    def _is_over(self) -> bool:
        """Return whether an instance has ended for a reason that no other instances would change."""
        seats = self._coordinator.view.seats
        return any(note.final and note.instance in seats for note in read_failures(self._folder))

    def close(self) -> None:
        """End those that do not belong to the run any more, or not yet."""
        self._board.put("over", {})
        for seat in self._given_up | self._coming | (set(self._coordinator.view.seats) - set(self._training)):
            self._instances.kill(seat)

    # --- those that are lost ---

    def _can_spare(self, lost: Iterable[int]) -> bool:
        """Return whether the others can go on: they train, or wait to."""
        able = self._board.all("able")
        left = set(self._coordinator.view.seats) - set(lost)
        if left == set(self._coordinator.view.seats):
            return True
        return bool(left) and all(seat in able or seat >= self._count for seat in left)

    def _failure(self, seat: int, code: int) -> Failure:
        notes = [note for note in read_failures(self._folder) if note.instance == seat]
        found = find_cause(notes, {seat: code}, self._host)
        return found or Failure(seat, self._host, code, f"ended with exit code {code}")

    def _silent(self, seats: tuple[int, ...]) -> dict[int, Failure]:
        """Return those that others have heard nothing from, and those that do not answer while a view is to begin."""
        found = set()
        for note in self._board.all("silent").values():
            if note.get("view") == self._coordinator.view.number:
                with suppress(TypeError):
                    found |= set(note.get("seats", ()))
        if self.is_changing and time.monotonic() - self._since > self._timeout_s:
            found |= self._coordinator.missing
        return {seat: Failure(seat, self._host, 0, "is silent") for seat in found & set(seats)}

    def _take_leave(self, seat: int, failure: Failure, counted: str) -> None:
        view = self._coordinator.view
        number = view.seats.index(seat) if seat in view.seats else self._place_of[seat]
        if failure.exit_code == 0:
            sentence = f"heard nothing from instance {number} on {self._host}"
            if seat == view.lead:
                self._instances.kill(seat)  # nothing else keeps it from writing to the run's folder
            else:
                self._given_up.add(seat)
        else:
            sentence = replace(failure, instance=number).sentence()
            self._forget(seat)
        what = "the others go on without it" if seat in view.seats else "it was to replace another"
        warn(f"{sentence}; {what} ({counted})")

    def _forget(self, seat: int) -> None:
        self._instances.forget(seat)
        clear_failure(self._folder, seat)
        self._coming.discard(seat)
        for kind in ("able", "come", "report", "silent"):
            self._board.remove(f"{kind}-{seat}")

    def _say_goodbye(self, seat: int) -> None:
        """Tell how an instance that was given up has ended."""
        notes = [note for note in read_failures(self._folder) if note.instance == seat]
        for note in notes:
            say(note.message)
        self._given_up.discard(seat)
        self._forget(seat)

    def _replace(self, seat: int) -> None:
        new, self._next_seat = self._next_seat, self._next_seat + 1
        self._place_of[new] = self._place_of[seat]
        self._coming.add(new)
        self._start(new, self._place_of[new])

    # --- views ---

    def _hear(self) -> None:
        """Take in what instances say; tell them who trains, and from which update on."""
        before = self._coordinator.beginning
        come = self._coming & self._board.all("come").keys()
        if come and self.is_settled:
            self._coordinator.add(come)
            self._coming -= come
        view = self._coordinator.view
        if view.number > self._told_of_view:
            self._told_of_view, self._since = view.number, time.monotonic()
            self._board.put("view", asdict(view))
        for seat, facts in self._board.all("report").items():
            with suppress(KeyError, TypeError, ValueError):
                self._coordinator.hear(report_from(seat, facts))
        beginning = self._coordinator.beginning
        if beginning is not None and beginning is not before and not self._coordinator.is_hopeless:
            self._training = view.seats
            self._board.put(f"begin-{view.number}", asdict(beginning))
            count = len(view.seats)
            who = "1 instance trains" if count == 1 else f"{count} instances train"
            say(f"{who} from update {beginning.update} on")


def report_from(seat: int, facts: Mapping[str, Any]) -> Report:
    """Return the report in a note; raise KeyError, TypeError or ValueError if it is none."""
    by = facts["recorded_by"]
    return Report(seat, int(facts["view"]), int(facts["update"]), bool(facts["whole"]), None if by is None else int(by))
