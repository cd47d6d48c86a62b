"""The rules by which instances come and go, tried with every order of events that hypothesis thinks of: notes that are
read late or never, instances that end at any step, two at once, one that wakes after it was given up."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from podium.launch.membership import Beginning, Coordinator, Member, Report, View

LAST = 8


@dataclass
class Instance:
    """A process, as far as the rules see it: its state is the list of updates that it was made by."""

    member: Member
    phase: str  # "trains", "waits" (has left its group), "takes" (in the new group, before the state has arrived)
    state: list[int] | None
    alive: bool = True
    stopped: bool = False
    beginning: Beginning | None = None
    #: what it has sent: by view, the updates for which the others can read its part of the sum
    posted: dict[int, set[int]] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        return self.alive and not self.stopped


class Crew(RuleBasedStateMachine):
    """A launcher and its instances. Notes are states that are read now or later: one that is replaced is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(range(3))
        self.views: list[View] = [self.coordinator.view]
        self.begun: dict[int, Beginning] = {}
        self.reports: dict[int, Report] = {}
        self.all: dict[int, Instance] = {
            seat: Instance(Member(seat, self.views[0], 0, recorded_by=0), "trains", []) for seat in range(3)
        }
        #: nothing has gone wrong since instances last did something
        self.calm = False
        #: (seat, update) of what leads have recorded
        self.recorded: set[tuple[int, int]] = set()

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
        one.posted.setdefault(one.member.view.number, set()).add(len(one.state))

    def can_complete(self, one: Instance) -> bool:
        """It can read all parts, whatever has become of the others since."""
        if one.phase != "trains":
            return False
        number, update = one.member.view.number, len(one.state)
        return all(update in other.posted.get(number, ()) for other in self.group(one))

    def complete(self, one: Instance) -> None:
        one.state = [*one.state, len(one.state)]
        one.member.update, one.member.recorded_by = len(one.state), None

    def can_record(self, one: Instance) -> bool:
        """What follows an update is done together: whoever is through knows that all have begun it."""
        if one.phase != "trains" or one.member.recorded_by is not None:
            return False
        return all(other.state is not None and len(other.state) >= len(one.state) for other in self.group(one))

    def record(self, one: Instance) -> None:
        one.member.recorded_by = one.member.view.lead
        if one.member.seat == one.member.view.lead:
            self.recorded.add((one.member.seat, len(one.state)))

    def has_heard(self, one: Instance) -> bool:
        """It reads who belongs to the run, between two updates or when it waits for another one in vain."""
        return one.member.heed(self.views[-1]) != "stay"

    def heed(self, one: Instance) -> None:
        newest = self.views[-1]
        match one.member.heed(newest):
            case "end":
                one.alive = False
            case "leave":
                one.phase, one.beginning = "waits", None
                self.reports[one.member.seat] = one.member.report(newest)

    def can_enter(self, one: Instance) -> bool:
        newest = self.views[-1]
        return one.phase == "waits" and newest.number in self.begun and one.member.seat in newest.seats

    def enter(self, one: Instance) -> None:
        newest = self.views[-1]
        one.beginning, one.phase = self.begun[newest.number], "takes"
        one.member.begin(newest, one.beginning)

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
        one.member.has_state(one.beginning)
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
            self.coordinator.remove(data.draw(st.sets(st.sampled_from(gone), min_size=1)))
            self.publish()

    @precondition(lambda self: len(self.coordinator.view.seats) > 1)
    @rule(data=st.data())
    def give_up_a_silent_one(self, data):
        if silent := [seat for seat in self.coordinator.view.seats if self.all[seat].stopped]:
            seat = data.draw(st.sampled_from(silent))
            if seat == self.coordinator.view.lead:
                self.all[seat].alive = False  # the launcher ends it: nothing else keeps it from writing
            self.coordinator.remove([seat])
            self.publish()

    @precondition(lambda self: len(self.all) < 7)
    @rule()
    def start_another(self):
        seat = len(self.all)
        self.all[seat] = Instance(Member(seat, View(-1, ())), "waits", None)

    @rule(data=st.data())
    def let_one_in(self, data):
        known = self.coordinator.view.seats
        new = [seat for seat, one in self.all.items() if one.acts and one.state is None and seat not in known]
        new = [seat for seat in new if seat > max(known, default=-1)]
        settled = all(self.all[seat].member.view == self.coordinator.view for seat in known)
        if new and known and settled:
            self.coordinator.add([data.draw(st.sampled_from(new))])
            self.publish()

    @rule(data=st.data())
    def hear_reports(self, data):
        if self.reports:
            for seat in data.draw(st.lists(st.sampled_from(sorted(self.reports)), min_size=1)):
                self.hear(seat)

    def hear(self, seat: int) -> None:
        self.coordinator.hear(self.reports[seat])
        beginning = self.coordinator.beginning
        if beginning is not None and not self.coordinator.is_hopeless:
            if beginning.view not in self.begun and not beginning.again and beginning.update:
                assert (self.coordinator.view.lead, beginning.update) in self.recorded
            self.begun.setdefault(beginning.view, beginning)

    # --- what goes wrong ---

    @precondition(lambda self: self.calm and sum(one.alive for one in self.all.values()) > 1)
    @rule(data=st.data())
    def kill(self, data):
        self.calm = data.draw(st.booleans())  # two at once
        self.all[data.draw(st.sampled_from([s for s, one in self.all.items() if one.alive]))].alive = False

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


TestCrew = Crew.TestCase
TestCrew.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
