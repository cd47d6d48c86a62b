"""Who belongs to a run at any moment. Pure: no processes, files or clocks; `crew.py` (in the launcher) and `member.py`
(in every instance) carry it out.

    seat        the number of an instance that no other one ever gets
    view        a number and the seats of the instances that train together; the first one leads
    report      what an instance says about its state once it has left the view before: which update it has completed
    beginning   how a view begins: at the furthest completed update, which one instance hands to those that are behind

When an instance is lost, given up or has come, the launcher makes the next view. Its instances leave the one before,
report, and wait; once all have reported, the launcher says how to begin. If another change comes meanwhile, it makes
another view, and all report again.

    Views never train side by side: only the launcher makes them; a view begins once all of its instances have left the
    one before; and the state of a view comes from an instance of the one before, which cannot be in both.
    An instance that was given up finds itself in no newer view, and ends.
"""

from collections.abc import Iterable, Mapping
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


class Coordinator:
    """The launcher's side: it alone makes views."""

    def __init__(self, seats: Iterable[int]) -> None:
        self.view = View(0, tuple(sorted(seats)))
        #: how the view begins, once all have reported; view 0 begins as every training does
        self.beginning: Beginning | None = None
        self._reports: dict[int, Report] = {}

    @property
    def missing(self) -> set[int]:
        """The seats that have not reported for the view yet."""
        return set(self.view.seats) - self._reports.keys()

    def remove(self, seats: Iterable[int]) -> None:
        """Make the next view without these."""
        self._change(set(self.view.seats) - set(seats))

    def add(self, seats: Iterable[int]) -> None:
        """Make the next view with these as well, at its end: seats are given in order."""
        self._change(set(self.view.seats) | set(seats))

    def _change(self, seats: set[int]) -> None:
        if seats == set(self.view.seats):
            return
        self.view = View(self.view.number + 1, tuple(sorted(seats)))
        self.beginning, self._reports = None, {}

    def hear(self, report: Report) -> None:
        """Take a report; those for other views, and of seats that are in none, count for nothing."""
        if report.view != self.view.number or report.seat not in self.view.seats or self.beginning is not None:
            return
        self._reports[report.seat] = report
        if self.missing:
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
        return not self.view.seats or (self.beginning is not None and self.beginning.update == NO_STATE)


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

    def begin(self, newest: View, beginning: Beginning) -> bool:
        """Enter a view; return whether the state has to be taken from the source."""
        assert beginning.view == newest.number
        assert self.seat in newest.seats
        self.view = newest
        if beginning.again:
            self.recorded_by = None
        return self.update != beginning.update

    def has_state(self, beginning: Beginning) -> None:
        """Note that the state of the beginning has arrived."""
        self.update, self.whole = beginning.update, True
        self.recorded_by = None if beginning.again else self.view.lead


def view_from(facts: Mapping[str, Any]) -> View:
    """Return a view from what `vars` made of it; raise ValueError, KeyError or TypeError if it is none."""
    return View(int(facts["number"]), tuple(int(seat) for seat in facts["seats"]))
