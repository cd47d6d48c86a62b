"""Learning rates over a training: the documented formulas, torch's where the definitions coincide, exact resume."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim import lr_scheduler

from podium.errors import UserError
from podium.optim.schedules import Schedule, build_schedule
from podium.recipe.sections.schedule import ScheduleSection

TOTAL = 200
PER_EPOCH = 20
BATCH = 32
BASE = 0.4


def build(total: int = TOTAL, base_lr: float = BASE, **keys) -> Schedule:
    return build_schedule(ScheduleSection(**keys), base_lr, total, PER_EPOCH, BATCH)


def rates(schedule: Schedule, num_updates: int = TOTAL) -> list[float]:
    return [schedule.lr(update) for update in range(num_updates)]


def torch_rates(make, num_updates: int = TOTAL) -> list[float]:
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    schedule = make(optimiser)
    result = []
    for _ in range(num_updates):
        result.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return result


NAMED = {
    "constant": {},
    "stepped": {"at": ["4ep", "0.75of"]},
    "cosine": {},
    "linear": {},
    "polynomial": {"power": 2},
    "exponential": {"rate": 0.97},
    "plateau": {},
}


@pytest.mark.parametrize(
    ("keys", "make"),
    [
        ({"name": "constant"}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ({"name": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL)),
        (
            {"name": "cosine", "final": 0.1},
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.1 * BASE),
        ),
        ({"name": "polynomial", "power": 2}, lambda o: lr_scheduler.PolynomialLR(o, total_iters=TOTAL, power=2)),
        ({"name": "linear", "final": 0.2}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=TOTAL)),
        ({"name": "exponential", "rate": 0.97, "every": "1up"}, lambda o: lr_scheduler.ExponentialLR(o, 0.97)),
        (
            {"name": "exponential", "rate": 0.5, "staircase": True},
            lambda o: lr_scheduler.StepLR(o, step_size=PER_EPOCH, gamma=0.5),
        ),
        ({"name": "stepped", "at": ["4ep", "0.75of"]}, lambda o: lr_scheduler.MultiStepLR(o, [80, 150], gamma=0.1)),
    ],
)
def test_without_warmup_the_rates_are_those_of_torch(keys, make):
    assert rates(build(**keys)) == pytest.approx(torch_rates(make), rel=1e-9, abs=1e-15)


def test_after_the_warmup_the_schedule_runs_over_what_is_left():
    warm = build(name="cosine", warmup="2ep")
    plain = build(name="cosine", total=TOTAL - 40)
    assert rates(warm)[40:] == rates(plain, TOTAL - 40)
    assert rates(warm)[:40] == pytest.approx([BASE * (update + 1) / 40 for update in range(40)])


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "cosine"},
        {"name": "linear", "final": 0.1},
        {"name": "polynomial", "power": 2},
        {"name": "exponential", "rate": 0.9},
    ],
)
def test_a_span_of_all_updates_counts_the_warmup_in(keys):
    """The warm-up hides the beginning of a fall that runs as if there were none."""
    over_all, plain = build(warmup="2ep", span="all", **keys), build(**keys)
    assert rates(over_all)[40:] == rates(plain)[40:]
    assert rates(over_all)[:40] == pytest.approx([BASE * (update + 1) / 40 for update in range(40)])
    assert rates(over_all) != rates(build(warmup="2ep", span="rest", **keys))


def test_both_spans_of_the_cosine_are_their_formulas():
    warmup, final = 40, 0.1
    for span, begin in (("all", 0), ("rest", warmup)):
        found = rates(build(name="cosine", warmup=f"{warmup}up", final=final, span=span))[warmup:]
        expected = [
            BASE * (final + (1 - final) / 2 * (1 + math.cos(math.pi * (update - begin) / (TOTAL - begin))))
            for update in range(warmup, TOTAL)
        ]
        assert found == pytest.approx(expected, rel=1e-12)
    assert rates(build(name="cosine", warmup="2ep")) == rates(build(name="cosine", warmup="2ep", span="rest"))


def test_a_warmup_in_steps_of_an_epoch_has_one_rate_for_each():
    found = rates(build(name="constant", warmup="6ep", warmup_step="1ep"))
    assert found[:120] == [BASE * ((update // PER_EPOCH + 1) / 6) for update in range(120)]
    assert set(found[120:]) == {BASE}
    uneven = rates(build(name="constant", warmup="50up", warmup_step="1ep"))
    assert [uneven[update] / BASE for update in (0, 19, 20, 40, 49, 50)] == pytest.approx([0.4, 0.4, 0.8, 1, 1, 1])


def test_exponential_decays_by_its_rate_every_duration_after_the_warmup():
    schedule = build(name="exponential", rate=0.97, every="640sa", warmup="1ep")
    assert schedule.lr(20) == BASE
    assert schedule.lr(40) == pytest.approx(BASE * 0.97)
    assert schedule.lr(50) == pytest.approx(BASE * 0.97**1.5)


def test_stepped_points_count_from_the_start_and_a_list_gives_parts_of_the_full_rate():
    schedule = build(name="stepped", warmup="1ep", at=["2ep", "0.5of", "3840sa"], factor=[0.5, 0.2, 0.3])
    assert [schedule.lr(u) / BASE for u in (39, 40, 99, 100, 119, 120)] == pytest.approx([1, 0.5, 0.5, 0.2, 0.2, 0.3])


def test_beyond_the_end_the_final_rate_stays():
    assert build(name="cosine", final=0.1).lr(10 * TOTAL) == pytest.approx(0.1 * BASE)
    assert build(name="polynomial", power=0.5).lr(10 * TOTAL) == 0


@st.composite
def sections(draw) -> ScheduleSection:
    name = draw(st.sampled_from(list(NAMED)))
    keys = dict(NAMED[name])
    if name in ("cosine", "linear", "polynomial"):
        keys["final"] = draw(st.floats(0, 1))
    if name == "polynomial":
        keys["power"] = draw(st.floats(0.1, 5))
    if name == "exponential":
        keys |= {"rate": draw(st.floats(0.01, 1)), "every": draw(st.sampled_from(["1up", "0.3of", "2ep"]))}
    warmups = ["0", "1up", "7up", "1ep", "1000sa"]
    warmup = draw(st.sampled_from(warmups if name == "stepped" else [*warmups, "0.2of", "0.28of"]))
    return ScheduleSection(name=name, warmup=warmup, **keys)


@settings(deadline=None)
@given(sections(), st.integers(110, 500), st.floats(1e-6, 10))
def test_rates_stay_between_zero_and_the_full_rate_and_join_at_the_end_of_the_warmup(section, total, base_lr):
    schedule = build_schedule(section, base_lr, total, PER_EPOCH, BATCH)
    values = rates(schedule, total + 2)
    assert all(0 <= value <= base_lr * (1 + 1e-12) for value in values)
    warmup = schedule.warmup_updates
    if warmup:
        assert values[warmup - 1] == base_lr
        assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup] == pytest.approx(base_lr, rel=1e-12)


@settings(deadline=None)
@given(sections())
def test_written_and_reread_a_section_is_the_same(section):
    assert ScheduleSection(**section.model_dump()) == section
    assert ScheduleSection(**json.loads(section.model_dump_json())) == section


losses = st.lists(
    st.one_of(st.floats(0, 10), st.sampled_from([1.0, 0.99995, 0.9998, 0.5, math.nan])), min_size=1, max_size=60
)
plateaus = st.fixed_dictionaries(
    {"patience": st.integers(0, 4), "cooldown": st.integers(0, 3), "threshold": st.sampled_from([0.0, 1e-4, 0.1])}
)


@settings(deadline=None)
@given(losses, plateaus)
def test_plateau_reduces_when_torch_does(values, keys):
    schedule = build(name="plateau", factor=0.5, min_lr=1e-3, **keys)
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    reference = lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.5, min_lr=1e-3, eps=0, **keys)
    for update, loss in enumerate(values):
        schedule.observe(loss, update)
        reference.step(loss)
        assert schedule.lr(update) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-12)


@settings(deadline=None)
@given(losses, plateaus, st.data())
def test_plateau_resumed_from_its_saved_state_is_the_straight_one(values, keys, data):
    cut = data.draw(st.integers(0, len(values)))
    straight, resumed = (build(name="plateau", warmup="5up", **keys) for _ in range(2))
    for update, loss in enumerate(values):
        if update == cut:
            resumed.load(json.loads(json.dumps(straight.state(), allow_nan=False)))
        straight.observe(loss, update)
        if update >= cut:
            resumed.observe(loss, update)
            assert resumed.lr(update) == straight.lr(update)
            assert resumed.state() == straight.state()


def test_plateau_defaults_are_the_published_ones():
    schedule = build(name="plateau", warmup="6ep")
    assert schedule.observes_validation
    schedule.observe(1.0, 120)
    for epoch in range(9):
        assert schedule.lr(140) == BASE
        schedule.observe(1.0, 140 + epoch)
    assert schedule.lr(140) == pytest.approx(0.11 * BASE)
    for epoch in range(2 + 9):
        assert schedule.lr(140) == pytest.approx(0.11 * BASE), epoch
        schedule.observe(1.0, 150 + epoch)
    assert schedule.lr(140) == pytest.approx(0.11**2 * BASE)


def test_validations_during_the_warmup_never_reduce_but_set_the_best():
    schedule = build(name="plateau", warmup="6ep", patience=0, cooldown=0)
    for epoch in range(1, 6):
        schedule.observe(0.5, PER_EPOCH * epoch)
    assert schedule.lr(120) == BASE
    schedule.observe(0.6, 120)
    assert schedule.lr(120) == pytest.approx(0.11 * BASE)


def test_only_plateau_has_state():
    for name, keys in NAMED.items():
        schedule = build(name=name, **keys)
        schedule.observe(1.0, 3)
        assert bool(schedule.state()) == (name == "plateau") == schedule.observes_validation
        schedule.load(schedule.state())


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "cosine", "patience": 3}, "patience does not apply to the cosine schedule"),
        ({"name": "constant", "factor": 0.1}, "factor does not apply to the constant schedule"),
        ({"name": "linear", "power": 2}, "power does not apply to the linear schedule"),
        ({"name": "plateau", "span": "all"}, "span does not apply to the plateau schedule"),
        ({"name": "stepped"}, "schedule.at is missing"),
        ({"name": "exponential"}, "schedule.rate is missing"),
        ({"name": "exponential", "rate": 0.9, "every": 0}, "longer than 0"),
        ({"name": "stepped", "at": ["1ep", "2ep"], "factor": [0.1]}, "one value for each of the 2 points"),
        ({"name": "plateau", "factor": [0.1]}, "expected one number"),
        ({"name": "plateau", "factor": 1.5}, "below 1"),
        ({"name": "cosine", "final": -0.1}, "greater than or equal to 0"),
        ({"name": "cosine", "warmup": "5"}, "expected a duration such as"),
        ({"name": "cosin"}, "Input should be"),
        ({"name": "cosine", "finale": 0}, "Extra inputs"),
    ],
)
def test_keys_that_make_no_sense_are_refused_with_a_sentence(keys, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ScheduleSection(**keys)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"warmup": "11ep"}, "expected at most the"),
        ({"name": "stepped", "at": ["2ep", "40up"]}, "expected increasing points"),
        ({"name": "stepped", "at": ["1ep"], "warmup": "2ep"}, "expected points after the warm-up"),
        ({"name": "plateau", "min_lr": 1.0}, "expected at most the learning rate"),
    ],
)
def test_keys_that_do_not_fit_the_training_are_refused_with_a_sentence(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        build(**keys)


def test_other_schedules_keys_may_be_null():
    assert ScheduleSection(name="cosine", patience=None, at=None).value("final") == 0
