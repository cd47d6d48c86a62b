"""Which seats are on which host, and which of the host's places each has. Pure; kept by `crew.py`."""

from collections.abc import Mapping, Sequence
from itertools import count

#: the arrival of the first host
HOME = 0


class Roster:
    """Seats by arrival: a host that comes again is another arrival."""

    def __init__(self, hosts: Mapping[int, str], home: str) -> None:
        """Begin with these seats; those of other hosts have their arrivals later."""
        self.home = home
        self._hosts = dict(hosts)
        self._arrival_of = {seat: HOME for seat, host in hosts.items() if host == home}
        self._named = {HOME: home}
        self._places = {
            seat: sorted(other for other in hosts if hosts[other] == host).index(seat) for seat, host in hosts.items()
        }
        self._next_seat = max(hosts, default=-1) + 1
        self._num_heeded: dict[int, int] = {}

    def knows(self, arrival: int) -> bool:
        return arrival in self._named

    def arrivals(self) -> list[int]:
        """Return those of other hosts."""
        return sorted(self._named.keys() - {HOME})

    def present(self) -> list[str]:
        """Return the hosts that have instances, or are about to."""
        return sorted({self._hosts[seat] for seat in self._arrival_of})

    def welcome(self, arrival: int, host: str, seats: Sequence[int]) -> None:
        """Note a host that has come, with seats that the run began with, or none."""
        self._named[arrival] = host
        self._arrival_of |= {seat: arrival for seat in seats if self._hosts.get(seat) == host}

    def new_seat(self, arrival: int) -> tuple[int, int]:
        """Return a seat that no other instance ever gets, and the first place of its host that is free."""
        taken = {self._places[seat] for seat in self.seats_of(arrival)}
        seat, place = self._next_seat, next(place for place in count() if place not in taken)
        self._next_seat += 1
        self._hosts[seat], self._arrival_of[seat], self._places[seat] = self._named[arrival], arrival, place
        return seat, place

    def forget(self, seat: int) -> None:
        """Free the place of an instance that has ended."""
        self._arrival_of.pop(seat, None)

    def seats_of(self, arrival: int) -> list[int]:
        return sorted(seat for seat, of_one in self._arrival_of.items() if of_one == arrival)

    def arrival_of(self, seat: int) -> int:
        """Return the arrival that a seat came with; -1 where its host has not come yet, or the seat is free."""
        return self._arrival_of.get(seat, -1)

    def host_named(self, arrival: int) -> str:
        return self._named[arrival]

    def host_of(self, seat: int) -> str:
        return self._hosts[seat]

    def place_of(self, seat: int) -> int:
        return self._places[seat]

    # --- requests of hosts that want to leave ---

    def num_heeded(self, arrival: int) -> int:
        return self._num_heeded.get(arrival, 0)

    def heed(self, arrival: int) -> None:
        self._num_heeded[arrival] = self.num_heeded(arrival) + 1
