"""The rules by which instances and hosts come and go, tried with every order of events that hypothesis thinks of: notes
that are read late or never, on other hosts later than on the first, instances and hosts that end at any step, two at
once, one that wakes after it was given up, some that come and some that are asked to leave.

Hypothesis finds short histories and makes them shorter; long ones are drawn by dice. PODIUM_MODEL_WALKS=20000 tries
more of these; `pytest -s` prints how many different states were seen.
"""

import os
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from podium.launch.membership import Beginning, Coordinator, Member, Report, View, in_order

LAST = 8
HOME, OTHERS = "a", ("b", "c")
#: the hosts of the seats at the beginning
FIRST = {0: "a", 1: "a", 2: "b"}
NUM_WALKS = int(os.environ.get("PODIUM_MODEL_WALKS", "300"))
#: the different states that were seen
SEEN: set[int] = set()


@dataclass
class Instance:
    """A process, as far as the rules see it: its state is the list of updates that it was made by."""

    member: Member
    phase: str  # "trains", "waits" (has left its group), "takes" (in the new group, before the state has arrived)
    state: list[int] | None
    host: str = HOME
    alive: bool = True
    stopped: bool = False
    beginning: Beginning | None = None
    #: whether its state is that after the record, validation and checkpoint that follow its last update
    followed: bool = True
    #: what it has sent: by view, the updates for which the others can read its part of the sum
    posted: dict[int, set[int]] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        return self.alive and not self.stopped


@dataclass
class Notes:
    """What the instances of a host can read, and have written: copies, as old as the last time they were carried."""

    view: View
    begun: dict[int, Beginning] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)


def some(data, of: list) -> list:
    """At least one of them."""
    return [one for one in of if data.draw(st.sampled_from((True, False)))] or [data.draw(st.sampled_from(of))]


class Crew(RuleBasedStateMachine):
    """The launchers of three hosts and their instances. Notes are states that are read now or later: one that is
    replaced is lost. Between hosts they are carried now and then, each way by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fewest = 1
        self.coordinator = Coordinator(FIRST, HOME, lambda count: count >= self.fewest)
        self.views: list[View] = [self.coordinator.view]
        self.begun: dict[int, Beginning] = {}
        self.reports: dict[int, Report] = {}
        self.at = {host: Notes(self.views[0]) for host in OTHERS}
        self.all: dict[int, Instance] = {
            seat: Instance(Member(seat, self.views[0], 0, recorded_by=0), "trains", [], host)
            for seat, host in FIRST.items()
        }
        #: seats that the launcher ended or that were asked to leave
        self.left: set[int] = set()
        #: nothing has gone wrong since instances last did something
        self.calm = False
        #: (seat, update) of what leads have recorded
        self.recorded: set[tuple[int, int]] = set()

    @initialize(fewest=st.integers(1, 3))
    def choose(self, fewest):
        self.fewest = fewest

    # --- what an instance can read on its host ---

    def newest(self, one: Instance) -> View:
        return self.views[-1] if one.host == HOME else self.at[one.host].view

    def begun_for(self, one: Instance) -> dict[int, Beginning]:
        return self.begun if one.host == HOME else self.at[one.host].begun

    @rule(host=st.sampled_from(OTHERS))
    def carry_down(self, host):
        self.at[host].view, self.at[host].begun = self.views[-1], dict(self.begun)

    @rule(host=st.sampled_from(OTHERS))
    def carry_up(self, host):
        self.reports |= self.at[host].reports

    # --- what an instance does ---

    @rule(data=st.data(), num=st.integers(1, 40))
    def act(self, data, num):
        """Some instances do what they can do next: most of what happens."""
        self.calm = True
        for _ in range(num):
            steps = [(step, one) for step, can in self.steps() for one in self.all.values() if one.acts and can(one)]
            if steps:
                step, one = data.draw(st.sampled_from(steps))
                step(one)

    def steps(self):
        return (
            (self.send, self.can_send),
            (self.complete, self.can_complete),
            (self.record, self.can_record),
            (self.heed, self.has_heard),
            (self.enter, self.can_enter),
            (self.take, self.can_take),
        )

    def can_send(self, one: Instance) -> bool:
        """It has its part of the sum ready, and has done what follows the update before."""
        return one.phase == "trains" and len(one.state) < LAST and one.member.recorded_by is not None

    def send(self, one: Instance) -> None:
        assert one.followed, "it goes on from a state that what follows the update was not made for"
        one.posted.setdefault(one.member.view.number, set()).add(len(one.state))

    def can_complete(self, one: Instance) -> bool:
        """It can read all parts, whatever has become of the others since."""
        if one.phase != "trains":
            return False
        number, update = one.member.view.number, len(one.state)
        return all(update in other.posted.get(number, ()) for other in self.group(one))

    def complete(self, one: Instance) -> None:
        one.state = [*one.state, len(one.state)]
        one.member.update, one.member.recorded_by, one.followed = len(one.state), None, False

    def can_record(self, one: Instance) -> bool:
        """What follows an update is done together: whoever is through knows that all have begun it."""
        if one.phase != "trains" or one.member.recorded_by is not None:
            return False
        return all(other.state is not None and len(other.state) >= len(one.state) for other in self.group(one))

    def record(self, one: Instance) -> None:
        view = one.member.view
        one.member.recorded_by, one.followed = view.lead, True
        if one.member.seat == view.lead:
            later = [other for other in self.views if other.number > view.number and other.number in self.begun]
            assert all(other.lead == view.lead for other in later), "two leads write"
            self.recorded.add((one.member.seat, len(one.state)))

    def has_heard(self, one: Instance) -> bool:
        """It reads who belongs to the run, between two updates or when it waits for another one in vain."""
        newest = self.newest(one)
        if one.member.heed(newest) == "leave" and one.phase == "waits":
            reports = self.reports if one.host == HOME else self.at[one.host].reports
            return one.member.seat not in reports or reports[one.member.seat].view != newest.number
        return one.member.heed(newest) != "stay"

    def heed(self, one: Instance) -> None:
        newest = self.newest(one)
        match one.member.heed(newest):
            case "end":
                if not (one.state is None and one.phase == "waits" and one.member.view.number < 0):
                    one.alive = False
            case "leave":
                assert one.phase != "trains" or one.member.view.number < newest.number
                one.phase, one.beginning = "waits", None
                # Some could not have the losses since the last record: one that they need has gone on to the next.
                one.member.whole = one.state is not None and (one.member.seat + newest.number) % 3 > 0
                reports = self.reports if one.host == HOME else self.at[one.host].reports
                reports[one.member.seat] = one.member.report(newest)

    def can_enter(self, one: Instance) -> bool:
        newest = self.newest(one)
        has_left = one.member.view.number < newest.number
        return one.phase == "waits" and has_left and newest.number in self.begun_for(one) and self.is_in(one, newest)

    def is_in(self, one: Instance, view: View) -> bool:
        return one.member.seat in view.seats

    def enter(self, one: Instance) -> None:
        newest = self.newest(one)
        one.beginning, one.phase = self.begun_for(one)[newest.number], "takes"
        one.member.begin(newest, one.beginning)
        if one.beginning.again and self.has_it(one):
            one.followed = False  # as before what is done again

    def can_take(self, one: Instance) -> bool:
        """All of the group have to be there for it."""
        if one.phase != "takes":
            return False
        number, source = one.member.view.number, self.all[one.beginning.source]
        there = all(other.member.view.number == number and other.phase != "waits" for other in self.group(one))
        return there and (source.alive or self.has_it(one))

    def has_it(self, one: Instance) -> bool:
        return one.state is not None and len(one.state) == one.beginning.update

    def take(self, one: Instance) -> None:
        if not self.has_it(one):
            assert one.state is None or len(one.state) < one.beginning.update, "an update is lost"
            one.state = list(self.all[one.beginning.source].state[: one.beginning.update])
        assert len(one.state) == one.beginning.update
        source = self.all[one.beginning.source]
        if source.beginning == one.beginning or source.member.seat == one.member.seat:
            one.followed = not one.beginning.again and source.followed
        else:  # it has gone on since
            one.followed = not one.beginning.again
        one.member.has_state(one.beginning)
        does_it = one.member.recorded_by is None
        assert does_it == one.beginning.again, "some of a group do what follows an update, and others do not"
        one.phase = "trains"

    def group(self, one: Instance) -> list[Instance]:
        return [self.all[seat] for seat in one.member.view.seats]

    # --- what the launcher does ---

    def publish(self) -> None:
        if self.coordinator.view.number > self.views[-1].number:
            self.views.append(self.coordinator.view)

    @rule(data=st.data())
    def notice_ends(self, data):
        """It sees some or all of those that have ended: two at once, or one after the other."""
        if gone := [seat for seat in self.coordinator.view.seats if not self.all[seat].alive]:
            self.coordinator.remove(some(data, gone))
            self.publish()

    @precondition(lambda self: len(self.coordinator.view.seats) > 1)
    @rule(data=st.data())
    def give_up_a_silent_one(self, data):
        if silent := [seat for seat in self.coordinator.view.seats if self.all[seat].stopped]:
            seat = data.draw(st.sampled_from(silent))
            if seat == self.coordinator.view.lead and self.all[seat].host == HOME:
                self.all[seat].alive = False  # the launcher ends it: nothing else keeps it from writing
            self.coordinator.remove([seat])
            self.publish()

    @precondition(lambda self: len(self.coordinator.view.seats) > self.fewest)
    @rule(data=st.data())
    def ask_one_to_leave(self, data):
        able = [seat for seat in self.coordinator.view.seats[1:] if self.all[seat].alive]
        if able:
            self.coordinator.remove([data.draw(st.sampled_from(able))])
            self.publish()

    @rule(host=st.sampled_from(OTHERS))
    def ask_a_host_to_leave(self, host):
        seats = [seat for seat in self.coordinator.view.seats if self.all[seat].host == host]
        if seats and len(self.coordinator.view.seats) - len(seats) >= self.fewest:
            self.coordinator.remove(seats)
            self.publish()

    @precondition(lambda self: len(self.all) < 8)
    @rule(host=st.sampled_from((HOME, *OTHERS)))
    def start_another(self, host):
        seat = len(self.all)
        self.all[seat] = Instance(Member(seat, View(-1, ())), "waits", None, host)

    @rule(num=st.integers(1, 2))
    def let_in(self, num):
        """Take in those that have come, once all train or where the others wait for them."""
        known = self.coordinator.view.seats
        new = [seat for seat, one in self.all.items() if one.acts and one.state is None and seat not in known]
        new = [seat for seat in new if not any(seat in view.seats for view in self.views)][:num]
        settled = all(self.all[seat].member.view == self.coordinator.view for seat in known)
        waits = self.coordinator.is_short and self.coordinator.view.number > 0
        if new and known and (settled or waits):
            self.coordinator.add({seat: self.all[seat].host for seat in new})
            assert set(self.coordinator.view.seats) == {*known, *new}, "one that trains is left out"
            self.publish()

    @rule(data=st.data())
    def hear_reports(self, data):
        if self.reports:
            for seat in some(data, sorted(self.reports)):
                self.hear(seat)

    def hear(self, seat: int) -> None:
        self.coordinator.hear(self.reports[seat])
        beginning = self.coordinator.beginning
        if beginning is not None and not self.coordinator.is_hopeless:
            view = self.coordinator.view
            assert beginning == self.begun.get(beginning.view, beginning), "a view begins twice"
            assert len(view.seats) >= self.fewest, "too few"
            assert self.all[view.lead].host == HOME, "nobody could end this lead"
            told = [self.reports[seat] for seat in view.seats]
            assert all(report.view == view.number for report in told), "one has not left the view before"
            there = [report for report in told if report.update == beginning.update]
            recorded = all(report.recorded_by in view.seats for report in there)
            assert beginning.again != recorded, "what follows an update is done twice, or not at all"
            by_seat = {report.seat: report for report in told}
            assert by_seat[beginning.source].whole or not any(report.whole for report in there), "losses are lost"
            if beginning.view not in self.begun and not beginning.again and beginning.update:
                assert (self.coordinator.view.lead, beginning.update) in self.recorded
            self.begun.setdefault(beginning.view, beginning)

    # --- what goes wrong ---

    @precondition(lambda self: self.calm and sum(one.alive for one in self.all.values()) > 1)
    @rule(data=st.data())
    def kill(self, data):
        self.calm = data.draw(st.sampled_from((True, False)))  # two at once
        self.all[data.draw(st.sampled_from([s for s, one in self.all.items() if one.alive]))].alive = False

    @precondition(lambda self: self.calm)
    @rule(host=st.sampled_from(OTHERS))
    def lose_a_host(self, host):
        self.calm = False
        for one in self.all.values():
            if one.host == host:
                one.alive = False

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def stop(self, data):
        self.calm = False
        if running := [one for one in self.all.values() if one.acts]:
            data.draw(st.sampled_from(running)).stopped = True

    @rule(data=st.data())
    def wake(self, data):
        if stopped := [one for one in self.all.values() if one.alive and one.stopped]:
            data.draw(st.sampled_from(stopped)).stopped = False

    # --- what always holds ---

    @invariant()
    def count_states(self):
        seats = [
            (
                one.host,
                one.alive,
                one.stopped,
                one.phase,
                one.member.view.number,
                one.member.recorded_by,
                one.member.whole,
            )
            for one in self.all.values()
        ]
        made = [None if one.state is None else len(one.state) for one in self.all.values()]
        notes = [(host, notes.view.number, sorted(notes.begun), str(notes.reports)) for host, notes in self.at.items()]
        coordinator = (self.coordinator.view, self.coordinator.beginning, self.fewest)
        SEEN.add(hash(str((seats, made, notes, coordinator, self.reports))))

    @invariant()
    def no_update_is_counted_twice_or_left_out(self):
        for one in self.all.values():
            assert one.state is None or one.state == list(range(len(one.state)))

    @invariant()
    def never_two_groups_that_both_go_on(self):
        """At most one view has all of its instances in it; and who trains in an older view can make one step at most,
        with parts that were sent before, which the next view begins with or makes in the same way."""
        whole = {
            view.number
            for view in self.views
            if view.seats and all(self.all[s].member.view == view and self.all[s].phase == "trains" for s in view.seats)
        }
        assert len(whole) <= 1, whole
        if whole:
            (number,) = whole
            furthest = max(len(self.all[seat].state) for seat in self.views[number].seats)
            for one in self.all.values():
                older = one.alive and one.member.view.number < number
                assert not older or one.state is None or len(one.state) <= furthest + 1

    @invariant()
    def instances_of_a_view_differ_by_one_update_at_most(self):
        for view in self.views:
            inside = [self.all[s] for s in view.seats if self.all[s].member.view == view]
            made = [len(one.state) for one in inside if one.phase == "trains"]
            assert not made or max(made) - min(made) <= 1

    def teardown(self):
        """Once nothing goes wrong any more: as long as one that belongs to the run and has the state lives, it comes to
        its end, by what everyone does in turn."""
        for one in self.all.values():
            one.stopped = False
        for _ in range(200):
            self.coordinator.remove([seat for seat in self.coordinator.view.seats if not self.all[seat].alive])
            self.publish()
            if self.coordinator.is_short and self.coordinator.view.seats:  # each that is lost is replaced
                self.start_another(HOME)
                self.let_in(2)
            for host in OTHERS:
                self.carry_down(host)
                self.carry_up(host)
            for seat in list(self.reports):
                self.hear(seat)
            for step, can in self.steps():
                for one in self.all.values():
                    if one.acts and can(one):
                        step(one)
        view = self.coordinator.view
        if any(self.all[seat].state is not None for seat in view.seats):
            for seat in view.seats:
                assert self.all[seat].state == list(range(LAST)), (view, self.all)
            assert {update for _, update in self.recorded} >= set(range(1, LAST + 1)), "a record is lost"
        for seat, one in self.all.items():
            assert seat in view.seats or one.state is None or not one.alive, "one that was given up goes on"
        super().teardown()


class Dice:
    """Draws like hypothesis does, a hundred times faster, and with weights: most rare orders of events are long."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draw(self, strategy):
        return self.random.choice(strategy.elements)


def walk(seed: int, num_steps: int = 250) -> None:
    """A long random history of one crew, to its end."""
    dice, crew = Dice(seed), Crew()
    pick = dice.random.choice
    crew.choose(fewest=pick((1, 1, 2, 3)))
    trouble = pick((0.02, 0.1, 0.3))
    launchers = (
        lambda: crew.notice_ends(dice),
        lambda: crew.hear_reports(dice),
        lambda: crew.carry_down(pick(OTHERS)),
        lambda: crew.carry_up(pick(OTHERS)),
        lambda: crew.let_in(pick((1, 2))),
        lambda: crew.give_up_a_silent_one(dice) if len(crew.coordinator.view.seats) > 1 else None,
    )
    troubles = (
        lambda: crew.kill(dice) if sum(one.alive for one in crew.all.values()) > 1 else None,
        lambda: crew.stop(dice),
        lambda: crew.wake(dice),
        lambda: crew.lose_a_host(pick(OTHERS)),
        lambda: crew.start_another(pick((HOME, *OTHERS))) if len(crew.all) < 9 else None,
        lambda: crew.start_another(HOME) if len(crew.all) < 9 else None,
        lambda: crew.ask_one_to_leave(dice) if len(crew.coordinator.view.seats) > crew.fewest else None,
        lambda: crew.ask_a_host_to_leave(pick(OTHERS)),
    )
    for _ in range(num_steps):
        if dice.random.random() < trouble:
            pick(troubles)()
        elif dice.random.random() < 0.4:
            pick(launchers)()
        else:
            crew.act(dice, 1)
        crew.count_states()
        crew.no_update_is_counted_twice_or_left_out()
        crew.never_two_groups_that_both_go_on()
        crew.instances_of_a_view_differ_by_one_update_at_most()
    crew.teardown()


def test_long_random_histories_break_no_rule():
    for seed in range(NUM_WALKS):
        try:
            walk(seed)
        except AssertionError as error:
            raise AssertionError(f"walk({seed}): {error}") from error
    print(f"{len(SEEN):,} different states in {NUM_WALKS:,} histories of 250 steps")
    assert len(SEEN) > 20 * NUM_WALKS


TestCrew = Crew.TestCase
TestCrew.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_instances_of_a_host_are_neighbours_and_the_first_host_leads():
    hosts = {2: "b", 3: "b", 5: "a", 6: "c", 7: "b", 9: "a"}
    assert in_order(hosts, "a") == (5, 9, 2, 3, 7, 6)


def test_one_that_was_put_back_before_what_follows_an_update_says_so_even_if_the_group_does_not_come_about():
    member = Member(1, View(0, (0, 1, 2)), 5, recorded_by=0)
    member.begin(View(1, (0, 1, 2)), Beginning(1, 5, source=0, again=True))
    assert member.report(View(2, (0, 1))).recorded_by is None
