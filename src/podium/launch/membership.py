"""Who belongs to a run at any moment. Pure: no processes, files or clocks; `crew.py` (in the launcher) and `member.py`
(in every instance) carry it out.

    seat        the number of an instance that no other one ever gets
    view        a number and the seats of the instances that train together; the first one leads
    report      what an instance says about its state once it has left the view before: which update it has completed
    beginning   how a view begins: at the furthest completed update, which one instance hands to those that are behind

When an instance is lost, given up or has come, the launcher makes the next view. Its instances leave the one before,
report, and wait; once all have reported, the launcher says how to begin. If another change comes meanwhile, it makes
another view, and all report again.

    The first host keeps the run: its launcher makes views, and one of its instances leads, where the launcher can end
    it at once. A view without one of them waits for one, as does a view of fewer instances than there may be.

    Views never train side by side: only the launcher makes them; a view begins once all of its instances have left the
    one before; and the state of a view comes from an instance of the one before, which cannot be in both.
    An instance that was given up finds itself in no newer view, and ends.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: of an instance that has come and has no state yet
NO_STATE = -1


@dataclass(frozen=True)
class View:
    """The instances that train together, in the order in which they carry replicas."""

    number: int
    seats: tuple[int, ...]

    @property
    def lead(self) -> int:
        return self.seats[0]


@dataclass(frozen=True)
class Report:
    """What an instance has when it waits for a view to begin."""

    seat: int
    view: int
    #: completed updates
    update: int
    #: whether it also has what the others had not recorded yet; it can hand over the state only if so
    whole: bool = True
    #: the lead under which it has finished what follows the update (record, validation, checkpoint), if it has
    recorded_by: int | None = None


@dataclass(frozen=True)
class Beginning:
    """How a view begins."""

    view: int
    update: int
    #: the seat that hands over the state
    source: int
    #: whether what follows the update has to be done again
    again: bool


def in_order(hosts: Mapping[int, str], home: str) -> tuple[int, ...]:
    """Return seats in the order in which they carry replicas: by host, `home` first, then those that came first."""
    first = {host: min(seat for seat in hosts if hosts[seat] == host) for host in hosts.values()}
    return tuple(sorted(hosts, key=lambda seat: (hosts[seat] != home, first[hosts[seat]], seat)))


class Coordinator:
    """The side of the first host's launcher: it alone makes views."""

    def __init__(self, hosts: Mapping[int, str], home: str, can_train: Callable[[int], bool] = bool) -> None:
        """Begin with these seats on their hosts, `home` the first one; `can_train`: whether so many instances may."""
        self._hosts, self._home, self._can_train = dict(hosts), home, can_train
        self.view = View(0, in_order(hosts, home))
        #: how the view begins, once all have reported; view 0 begins as every training does
        self.beginning: Beginning | None = None
        self._reports: dict[int, Report] = {}

    def host_of(self, seat: int) -> str:
        """Return the host of a seat of the view."""
        return self._hosts[seat]

    @property
    def missing(self) -> set[int]:
        """The seats that have not reported for the view yet."""
        return set(self.view.seats) - self._reports.keys()

    @property
    def is_short(self) -> bool:
        """Whether the view cannot begin before others have come."""
        return not self._can_train(len(self.view.seats)) or self._home not in self._hosts.values()

    def remove(self, seats: Iterable[int]) -> None:
        """Make the next view without these."""
        gone = set(seats)
        self._change({seat: host for seat, host in self._hosts.items() if seat not in gone})

    def add(self, hosts: Mapping[int, str]) -> None:
        """Make the next view with these as well: seats and their hosts."""
        self._change(self._hosts | dict(hosts))

    def _change(self, hosts: dict[int, str]) -> None:
        if hosts == self._hosts:
            return
        self._hosts = hosts
        self.view = View(self.view.number + 1, in_order(hosts, self._home))
        self.beginning, self._reports = None, {}

    def allow(self, can_train: Callable[[int], bool]) -> None:
        """Let other numbers of instances train."""
        self._can_train = can_train
        self._begin_if_all_wait()

    def hear(self, report: Report) -> None:
        """Take a report; those for other views, and of seats that are in none, count for nothing."""
        if report.view != self.view.number or report.seat not in self.view.seats:
            return
        self._reports[report.seat] = report
        self._begin_if_all_wait()

    def _begin_if_all_wait(self) -> None:
        if self.beginning is not None or not self._reports or self.missing or self.is_short:
            return
        reports = [self._reports[seat] for seat in self.view.seats]
        furthest = max(report.update for report in reports)
        there = [report for report in reports if report.update == furthest]
        source = next((report for report in there if report.whole), there[0])
        again = any(report.recorded_by not in self.view.seats for report in there)
        self.beginning = Beginning(self.view.number, furthest, source.seat, again)

    @property
    def is_hopeless(self) -> bool:
        """Return whether no instance that is left has the state."""
        return not self.missing and all(report.update == NO_STATE for report in self._reports.values())


@dataclass
class Member:
    """An instance's side: where it stands."""

    seat: int
    #: the view that it belongs to, or last belonged to
    view: View
    update: int = NO_STATE
    whole: bool = True
    recorded_by: int | None = None

    def heed(self, newest: View) -> Literal["stay", "leave", "end"]:
        """Return what to do when this is the newest view."""
        if newest.number <= self.view.number:
            return "stay"
        return "leave" if self.seat in newest.seats else "end"

    def report(self, newest: View) -> Report:
        return Report(self.seat, newest.number, self.update, self.whole, self.recorded_by)

    def begin(self, newest: View, beginning: Beginning) -> None:
        """Enter a view, where the state may have to be taken from the source."""
        assert beginning.view == newest.number
        assert self.seat in newest.seats
        self.view = newest
        if beginning.again:
            self.recorded_by = None

    def has_state(self, beginning: Beginning) -> None:
        """Note that the state of the beginning has arrived."""
        self.update = beginning.update
        self.recorded_by = None if beginning.again else self.view.lead


def view_from(facts: Mapping[str, Any]) -> View:
    """Return a view from what `vars` made of it; raise ValueError, KeyError or TypeError if it is none."""
    return View(int(facts["number"]), tuple(int(seat) for seat in facts["seats"]))


def report_from(seat: int, facts: Mapping[str, Any]) -> Report:
    """Return the report in a note; raise KeyError, TypeError or ValueError if it is none."""
    by = facts["recorded_by"]
    return Report(seat, int(facts["view"]), int(facts["update"]), bool(facts["whole"]), None if by is None else int(by))
