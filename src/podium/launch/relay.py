"""The side of a host that is not the first one: it starts and ends instances as the launcher of the first host says,
and carries notes between them and it (`between_hosts.py`). Has the form of `Crew`."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from podium.launch.agreement import HostLost
from podium.launch.between_hosts import PULSE_S, Down, Up, arrive, get_down, put_up
from podium.launch.board import Board
from podium.launch.failures import FINAL, PEER_LOST, find_cause, read_failures
from podium.launch.processes import LocalInstances

#: what instances say that concerns the first host
_KINDS = ("able", "bound", "come", "report", "silent", "cannot")

#: what a note of the first host may be called; it names a file here
_NAME = re.compile(r"[a-z]+(-\d{1,12})?")


class Relay:
    """The instances of this host, by their seats."""

    def __init__(
        self,
        board: Board,
        attempt: int,
        host: str,
        instances: LocalInstances,
        store: dist.Store,
        start: Callable[[int, int], None],
        seats: Mapping[int, int],
        wants: int = 0,
    ) -> None:
        """Look after the instances that are about to be started at `seats`, and `start` others: a seat and its place.

        `wants`: how many instances this host has cores for, where it comes to a run under way.
        """
        self._board, self._instances, self._store, self._start = board, instances, store, start
        self._board.open()
        self._attempt = attempt
        self._up = Up(host, attempt, sorted(seats), wants)
        self._started = set(seats)
        self._codes: dict[int, int] = {}
        self._mirrored: dict[str, Mapping[str, Any]] = {}
        self._put, self._next_put = "", 0.0
        self._asked: set[int] = set()
        #: what the first host has said last
        self.down: Down | None = None
        try:
            self.number = arrive(store)
            self._tell()
        except dist.DistError:
            raise HostLost from None

    @property
    def is_changing(self) -> bool:
        """Whether instances wait for a view to begin: then every hundredth of a second counts."""
        view = self._mirrored.get("view")
        return view is not None and view["number"] > 0 and f"begin-{view['number']}" not in self._mirrored

    @property
    def refusal(self) -> str:
        """Why this host has no place in the run, or none any more; empty where it has."""
        return self.down.refused.get(str(self.number), "") if self.down is not None else ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or goes on without this host. One that restarts is not over for a host that it
        began with; another one comes to it again."""
        restarts = not self._up.seats and self.next_attempt is not None
        return self._mirrored.get("over") == {"again": False} or bool(self.refusal) or restarts

    @property
    def reason(self) -> str:
        """Why the run has to restart, as far as it is known here."""
        lost = {seat: code for seat, code in self._codes.items() if code}
        cause = find_cause(read_failures(self._board.launch_folder), lost, self._up.host)
        return cause.sentence() if cause is not None and cause.exit_code != PEER_LOST else ""

    @property
    def next_attempt(self) -> int | None:
        """The attempt that the run has begun since this one; None where there is none."""
        return self.down.attempt if self.down is not None and self._is_later(self.down) else None

    @property
    def was_taken_in(self) -> bool:
        """Whether any instance was started here."""
        return bool(self._started)

    def _is_later(self, down: Down) -> bool:
        return down.attempt > self._attempt

    def has_ended(self) -> bool:
        """Return whether all instances of this host have ended well, or it has none any more."""
        codes = self._instances.exit_codes()
        return all(code == 0 for code in codes.values()) and (bool(codes) or self.is_over)

    def look(self, num_lost: int, most: int, *, stopping: bool = False) -> int | None:
        """Carry notes and orders. Return None where the run has ended for a reason that no restart would change."""
        try:
            self._obey()
            self._tell()
        except dist.DistError:
            raise HostLost from None
        return None if any(code in FINAL for code in self._codes.values()) else 0

    def ask_to_leave(self, count: int) -> None:
        """Ask to take so many instances away; below 0: all of them."""
        self._up.leaves.append(count)

    def close(self) -> None:
        """Tell this host's instances that the run is over, and the first host how they have ended."""
        self._board.put("over", {"again": False})
        with suppress(dist.DistError):
            self._tell()

    def _obey(self) -> None:
        down = self.down = get_down(self._store)
        if down is None or down.attempt != self._attempt:
            return
        for name, facts in down.notes.items():
            if _NAME.fullmatch(name) and self._mirrored.get(name) != facts:
                self._board.put(name, facts)
                self._mirrored[name] = facts
        for seat in down.kill:
            if seat in self._instances.exit_codes():
                self._instances.kill(seat)
                self._codes[seat] = -9
        for name, place in down.start.get(str(self.number), {}).items():
            if int(name) not in self._started:
                self._started.add(int(name))
                self._start(int(name), place)

    def _tell(self) -> None:
        self._take_codes()
        self._hear_requests()
        up = self._up
        up.notes = {
            f"{kind}-{seat}": facts
            for kind in _KINDS
            for seat, facts in self._board.all(kind).items()
            if self._codes.get(seat, 0) == 0
        }
        up.codes = {str(seat): code for seat, code in self._codes.items()}
        up.failures = [vars(note) for note in read_failures(self._board.launch_folder)]
        text = json.dumps([up.notes, up.codes, up.failures, up.leaves])
        now = time.monotonic()
        if text != self._put or now >= self._next_put:
            up.pulse += 1
            put_up(self._store, self.number, up)
            self._put, self._next_put = text, now + PULSE_S

    def _take_codes(self) -> None:
        for seat, code in self._instances.exit_codes().items():
            if code is not None:
                self._codes[seat] = code
            if code:
                self._instances.forget(seat)

    def _hear_requests(self) -> None:
        for number, facts in self._board.all("ask").items():
            if number not in self._asked:
                self._asked.add(number)
                if facts.get("do") == "leave":
                    self.ask_to_leave(int(facts.get("instances") or -1))
                    self._board.put(f"answer-{number}", {"said": "asked the first host"})
