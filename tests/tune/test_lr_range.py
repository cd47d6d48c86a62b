"""The learning-rate range test: what it finds, and that it finds the same again."""

import itertools
import math

import pytest

from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from podium.tune.lr_range import RangeTest, range_test, rising_rates
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY


def test_rates_rise_by_the_same_factor():
    rates = rising_rates(50)
    assert rates[0] == pytest.approx(1e-7)
    assert rates[-1] == pytest.approx(10)
    factors = [after / before for before, after in itertools.pairwise(rates)]
    assert factors == pytest.approx([factors[0]] * 49)


def test_the_steepest_fall_and_the_lowest_loss_are_found():
    rates = rising_rates(100)
    # Falls as the rate passes 1e-3, and rises again beyond 1.
    losses = [2 / (1 + rate / 1e-3) + 0.1 + (rate if rate > 1 else 0) for rate in rates]
    found = RangeTest(rates, losses, losses)
    assert 3e-4 < found.steepest < 3e-3
    assert 0.5 < found.lowest < 1.5
    flat = RangeTest(rates, [1.0] * 100, [1.0] * 100)
    assert flat.steepest is None


def test_the_test_finds_the_same_again_and_stops_where_the_loss_diverges(one_thread):
    name, *overrides = TINY["mnist"]
    recipe = load_recipe(name, [*overrides, "workload.data.generated_train=1024", "batch.micro=16"])
    first, second = (range_test(build_training(recipe, fresh=True), 60) for _ in range(2))
    assert first == second
    assert all(map(math.isfinite, first.losses))
    assert first.steepest is not None
    assert first.steepest < first.lowest


def test_the_command_prints_and_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = podium_here("tune", *TINY["mnist"], "workload.data.generated_train=512", "--lr", "--updates", 40)
    assert done.returncode == 0, done.stderr
    assert "loss is lowest" in done.stdout
    assert (tmp_path / "learning-rates.png").read_bytes().startswith(b"\x89PNG")
    again = podium_here("tune", *TINY["mnist"], "--lr")
    assert_user_error(again, "learning-rates.png already exists")
