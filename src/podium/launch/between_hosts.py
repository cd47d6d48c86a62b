"""What the launchers of several hosts tell one another while instances come and go, at the service where they meet.

    arrival   a number that a host gets each time it comes: what it said before counts for nothing any more
    up        of each arrival: its notes, how its instances have ended, whether it wants to leave
    down      of the first host, for all: its notes, which instances to start and to end, whom it has no place for

Each of them is a whole state, written over the one before: whoever misses one reads the next. `crew.py` decides on the
first host, `relay.py` carries it out on the others.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from podium.errors import UserError
from podium.launch.failures import Failure, failure_from

_ARRIVALS, _DOWN = "crew/arrivals", "crew/down"
#: how often a host says that it is still there
PULSE_S = 0.5
#: a host whose instances are silent is lost once it has been silent for so long
SILENT_S = 2.0


@dataclass
class Up:
    """What a host says."""

    host: str
    attempt: int
    #: the seats that it brings, and how many more instances it has cores for
    seats: list[int] = field(default_factory=list)
    wants: int = 0
    #: notes of its instances, by name
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: how those of its instances that have ended did so
    codes: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    #: how many instances it takes away, one request after the other; below 0: all
    leaves: list[int] = field(default_factory=list)
    pulse: int = 0


@dataclass
class Down:
    """What the first host says."""

    attempt: int
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: by arrival: seats to start instances for, each at one of the host's places
    start: dict[str, dict[str, int]] = field(default_factory=dict)
    kill: list[int] = field(default_factory=list)
    #: by arrival: why it has no place in the run, or none any more
    refused: dict[str, str] = field(default_factory=dict)


def arrive(store: dist.Store) -> int:
    """Return a number for a host that has come."""
    return store.add(_ARRIVALS, 1)


def put_up(store: dist.Store, number: int, up: Up) -> None:
    store.set(f"crew/up-{number}", json.dumps(asdict(up)))


def get_down(store: dist.Store) -> Down | None:
    """Return what the first host says; None where it has said nothing yet."""
    if not store.check([_DOWN]):
        return None
    try:
        return Down(**json.loads(store.get(_DOWN)))
    except (TypeError, ValueError):
        raise UserError("the first host of the run has another version of Podium") from None


def set_under_way(store: dist.Store, attempt: int) -> None:
    """Note that the run goes on without a host that is lost, and takes in those that come."""
    store.set("crew/under-way", str(attempt))


def is_under_way(store: dist.Store) -> bool:
    return attempt_under_way(store) is not None


def attempt_under_way(store: dist.Store) -> int | None:
    """Return the attempt that hosts may come to; None where there is none."""
    return int(store.get("crew/under-way")) if store.check(["crew/under-way"]) else None


class OtherHosts:
    """The other hosts as the first one knows them, in one attempt."""

    def __init__(self, store: dist.Store, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        #: what each arrival said last, and since when it has said nothing new
        self.ups: dict[int, Up] = {}
        self._texts: dict[int, bytes] = {}
        self._since: dict[int, float] = {}
        self._ignored: set[int] = set()
        self._forgotten: set[int] = set()
        self._last_news = time.monotonic()
        self.down = Down(attempt)
        self._told: Down | None = None

    def look(self) -> None:
        """Read what the others say."""
        count = int(self._store.get(_ARRIVALS)) if self._store.check([_ARRIVALS]) else 0
        for number in range(1, count + 1):
            key = f"crew/up-{number}"
            if number in self._ignored or not self._store.check([key]):
                continue
            text = self._store.get(key)
            if text == self._texts.get(number):
                continue
            self._texts[number], self._since[number] = text, time.monotonic()
            up = _up_from(text)
            if up is None or up.attempt < self._attempt:
                continue
            if number not in self.ups or _without_pulse(up) != _without_pulse(self.ups[number]):
                self._last_news = time.monotonic()
            self.ups[number] = up

    def tell(self) -> None:
        """Tell the others what has changed."""
        text = Down(**json.loads(json.dumps(asdict(self.down))))
        if text != self._told:
            self._told = text
            self._store.set(_DOWN, json.dumps(asdict(self.down)))

    def news_age_s(self) -> float:
        """Return for how long no host has said anything new."""
        return time.monotonic() - self._last_news

    def silence_s(self, number: int) -> float:
        return time.monotonic() - self._since[number]

    def ignore(self, number: int) -> None:
        """Listen to an arrival no more."""
        self._ignored.add(number)
        self.ups.pop(number, None)
        self.down.start.pop(str(number), None)

    # --- of their instances ---

    def codes(self) -> dict[int, int]:
        """Return how those of their instances that have ended did so."""
        found = {int(seat): int(code) for up in self.ups.values() for seat, code in up.codes.items()}
        return {seat: code for seat, code in found.items() if seat not in self._forgotten}

    def failures(self) -> list[Failure]:
        """Return the notes on what went wrong."""
        notes = []
        for facts in [one for up in self.ups.values() for one in up.failures]:
            with suppress(ValueError):
                notes.append(failure_from(facts))
        return [note for note in notes if note.instance not in self._forgotten]

    def notes(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the notes `kind-NUMBER`, by number."""
        found: dict[int, dict[str, Any]] = {}
        for up in self.ups.values():
            for name, facts in up.notes.items():
                of_kind, _, number = name.rpartition("-")
                if of_kind == kind and number.isdecimal() and int(number) not in self._forgotten:
                    found[int(number)] = facts
        return found

    def forget(self, seat: int) -> None:
        """Forget an instance that has ended."""
        self._forgotten.add(seat)

    def start(self, number: int, seat: int, place: int) -> None:
        """Have an arrival start an instance."""
        self.down.start.setdefault(str(number), {})[str(seat)] = place


def _up_from(text: bytes) -> Up | None:
    """Return what a host says; None where it has another version of Podium, and says it in another way."""
    with suppress(TypeError, ValueError):
        return Up(**json.loads(text))
    return None


def _without_pulse(up: Up) -> Mapping[str, Any]:
    return {**asdict(up), "pulse": 0}
