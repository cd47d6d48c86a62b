"""Which instances leave, and what is said where none may."""

import pytest

from podium.launch.leaving import seats_to_take, why_needed
from podium.launch.plan import Limits
from podium.launch.roster import Roster

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
SEATS = tuple(HOSTS)


def roster_of_all():
    roster = Roster(HOSTS, "a")
    roster.welcome(1, "b", [2, 3])
    return roster


@pytest.mark.parametrize(
    ("host", "count", "limits", "taken"),
    [
        ("", 1, Limits(), {3}),
        ("", 3, Limits(), {1, 2, 3}),
        ("a", 1, Limits(), {1}),
        ("b", -1, Limits(), {2, 3}),
        ("b", 1, Limits(at_once=1), {3}),
    ],
)
def test_the_last_ones_leave_and_never_the_first(host, count, limits, taken):
    assert seats_to_take(roster_of_all(), SEATS, limits, host, count) == taken


@pytest.mark.parametrize(
    ("host", "count", "limits", "why"),
    [
        ("", 4, Limits(), "a keeps the run and needs one instance"),
        ("a", -1, Limits(), "a keeps the run and needs one instance"),
        ("", 2, Limits(fewest=3), "3 must be left"),
        ("", 2, Limits(fits={4, 1}.__contains__), "1 must be left"),
        ("", 5, Limits(), "the run has only 4 instances"),
        ("b", 3, Limits(), "b has only 2 instances"),
        ("c", 1, Limits(), "c has no instances in this run, only a, b"),
        ("", 2, Limits(most=4, at_once=1), "1 at most can leave at once"),
    ],
)
def test_what_the_others_need_stays_and_the_reason_is_told(host, count, limits, why):
    assert seats_to_take(roster_of_all(), SEATS, limits, host, count) is None
    assert why in why_needed(roster_of_all(), SEATS, limits, host, count)
