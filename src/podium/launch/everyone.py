"""The instances of all hosts, as the first host's launcher sees them: its own through processes and notes in a folder,
those of the others through what their launchers say. Used by `crew.py`."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from podium.launch.between_hosts import SILENT_S, OtherHosts, Up
from podium.launch.board import QUIET_S, Board
from podium.launch.failures import Failure, clear_failure, read_failures
from podium.launch.processes import LocalInstances
from podium.launch.roster import HOME

#: starts a process: its seat, and which of the host's places for instances it takes
Start = Callable[[int, int], None]


class Everyone:
    """Reads, and writes, on this host and the others alike."""

    def __init__(self, board: Board, instances: LocalInstances, start: Start, others: OtherHosts | None) -> None:
        self._board, self._instances, self._start, self._others = board, instances, start, others
        self._board.open()

    # --- reading ---

    def look(self) -> None:
        """Read what the other hosts say."""
        if self._others is not None:
            self._others.look()

    def ups(self) -> dict[int, Up]:
        """Return what each arrival of another host says."""
        return dict(self._others.ups) if self._others is not None else {}

    def silence_s(self, number: int) -> float:
        assert self._others is not None
        return self._others.silence_s(number)

    def silent_arrivals(self, seconds: float = SILENT_S) -> set[int]:
        """Return the hosts that have said nothing for so long, not even that they are there."""
        return {number for number in self.ups() if self.silence_s(number) > seconds}

    def is_quiet(self, timeout_s: float) -> bool:
        """Return whether nobody has said anything new for a while, and no other host is silent for `timeout_s`."""
        calm = self._others is None or self._others.news_age_s() > QUIET_S
        return self._board.is_quiet() and calm and not self.silent_arrivals(timeout_s)

    def notes(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the notes `kind-NUMBER`, by number."""
        return self._board.all(kind) | (self._others.notes(kind) if self._others is not None else {})

    def codes(self) -> dict[int, int | None]:
        """Return how each instance has ended; None: it has not, as far as it is known."""
        return self._instances.exit_codes() | (self._others.codes() if self._others is not None else {})

    def failures(self) -> list[Failure]:
        return read_failures(self._board.launch_folder) + self.failures_elsewhere()

    def failures_elsewhere(self) -> list[Failure]:
        return self._others.failures() if self._others is not None else []

    # --- writing ---

    def put(self, name: str, facts: Mapping[str, Any]) -> None:
        """Put a note where all instances read it."""
        self._board.put(name, facts)
        if self._others is not None:
            notes, kind = self._others.down.notes, name.partition("-")[0]
            for older in [one for one in notes if one.partition("-")[0] == kind]:
                del notes[older]
            notes[name] = dict(facts)

    def tell(self) -> None:
        """Tell the other hosts what has changed."""
        if self._others is not None:
            self._others.tell()

    def close(self) -> None:
        with suppress(dist.DistError):
            self.tell()

    def start(self, arrival: int, seat: int, place: int) -> None:
        """Have an instance started on a host."""
        if arrival == HOME:
            self._start(seat, place)
        else:
            assert self._others is not None
            self._others.start(arrival, seat, place)

    def kill(self, seat: int) -> None:
        """End an instance of this host at once."""
        self._instances.kill(seat)

    def forget(self, seat: int) -> None:
        """Forget an instance that has ended."""
        self._instances.forget(seat)
        clear_failure(self._board.launch_folder, seat)
        for kind in ("able", "bound", "come", "report", "silent"):
            self._board.remove(f"{kind}-{seat}")
        if self._others is not None:
            self._others.forget(seat)

    def refuse(self, arrival: int, why: str) -> None:
        """Tell a host that it has no place in the run, or none any more, and listen to it no longer."""
        assert self._others is not None
        self._others.down.refused[str(arrival)] = why
        self._others.ignore(arrival)
