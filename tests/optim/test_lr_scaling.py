"""The learning rate follows the global batch by the rule the recipe names, and contradictions are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import UserError
from podium.optim.lr_scaling import scaled_lr

batches = st.integers(1, 100_000)
rates = st.floats(1e-8, 100)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [("none", 2e-4), ("sqrt", 4e-4), ("linear", 8e-4)],
)
def test_rate_at_four_times_the_base_batch(scale, expected):
    assert scaled_lr(lr=2e-4, scale=scale, base_batch=64, global_batch=256) == pytest.approx(expected, rel=1e-15)


def test_exponent_form_is_a_power_of_two_per_sample_of_the_global_batch():
    assert scaled_lr(lr=None, lr_exponent=-11, base_batch=None, global_batch=2048) == 1.0
    assert scaled_lr(lr=None, lr_exponent=-7, base_batch=None, global_batch=1) == 1 / 128


@given(rates, batches, st.sampled_from(["none", "sqrt", "linear"]))
def test_at_the_base_batch_every_scale_is_the_rate_itself(lr, batch, scale):
    assert scaled_lr(lr=lr, scale=scale, base_batch=batch, global_batch=batch) == pytest.approx(lr, rel=1e-15)


@given(rates, batches, batches)
def test_the_root_lies_between_none_and_linear(lr, base_batch, global_batch):
    none, root, linear = (
        scaled_lr(lr=lr, scale=scale, base_batch=base_batch, global_batch=global_batch)
        for scale in ("none", "sqrt", "linear")
    )
    assert math.isclose(root, math.sqrt(none * linear), rel_tol=1e-12)


@given(st.integers(-30, 4), batches, batches)
def test_exponent_form_is_linear_in_the_batch(exponent, one, other):
    rate = [
        scaled_lr(lr=None, lr_exponent=exponent, base_batch=None, global_batch=b) for b in (one, other, one + other)
    ]
    assert math.isclose(rate[0] + rate[1], rate[2], rel_tol=1e-12)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lr": None}, "missing"),
        ({"lr": 0.1, "lr_exponent": -7}, "contradict"),
        ({"lr": None, "lr_exponent": -7, "scale": "sqrt"}, "expected none with optim.lr_exponent"),
        ({"lr": 0.1, "scale": "linear"}, "optim.base_batch is missing"),
    ],
)
def test_contradictions_are_the_users_mistake(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        scaled_lr(**{"base_batch": None, "global_batch": 64, **keys})
