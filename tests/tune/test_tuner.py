"""The tuner: what it tries, how it finds the best, what training makes of it."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.machine.device import resolve_device
from podium.recipe.loading import load_recipe, recipe_with
from podium.topology import Blocks, possible_instances
from podium.tune import tuner
from podium.tune.cache import Outcome, recall, remember
from podium.tune.space import Choice, choices, halve, shapes, survivors, useful_instances

BASE = Choice("channels_last", False, 1, micro=4, accumulation=2, replicas=4, instances=1, prefetch=2)
small = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def bases(draw):
    return Choice(
        "channels_last", False, draw(st.sampled_from([1, 2])), draw(small), draw(small), draw(small), 1, draw(small)
    )


@given(bases(), st.integers(1, 16))
def test_every_choice_has_the_same_global_batch_and_fits_the_cores(base, num_cores):
    found = choices(base, num_cores)
    assert found[0] == base
    assert len(set(found)) == len(found)
    for choice in found:
        assert choice.micro * choice.accumulation * choice.replicas == base.micro * base.accumulation * base.replicas
        assert choice.instances in possible_instances(choice.replicas)
        assert choice.threads * choice.instances <= max(num_cores, base.threads)


def test_passes_are_merged_over_accumulation_and_replicas_and_halved():
    assert set(shapes(BASE)) == {(4, 2, 4), (8, 2, 2), (16, 2, 1), (8, 1, 4), (16, 1, 2), (32, 1, 1), (2, 4, 4)}


def test_what_a_person_has_chosen_is_left_alone():
    fixed = frozenset({"engine.layout", "engine.threads", "batch.micro"})
    found = choices(BASE, 4, fixed)
    assert {(c.layout, c.threads, c.micro) for c in found} == {("channels_last", 1, 4)}
    assert {c.instances for c in found} == {1, 2, 4}
    assert all(c.same_bits(BASE) for c in found)


def test_only_instances_and_prefetch_keep_the_bits():
    from dataclasses import replace

    assert replace(BASE, instances=4, prefetch=0).same_bits(BASE)
    for other in ({"layout": "default"}, {"compile": True}, {"threads": 2}, {"micro": 8, "accumulation": 1}):
        assert not replace(BASE, **other).same_bits(BASE)


@given(st.integers(0, 10**6))
def test_halving_finds_the_fastest_though_visits_are_noisy(seed):
    rng = random.Random(seed)
    candidates = choices(BASE, 4)
    true = {choice: rng.uniform(100, 200) for choice in candidates}
    fastest = rng.choice(candidates)
    true[fastest] = 300.0
    visits = []

    def rate(choice, seconds):
        visits.append((choice, seconds))
        return true[choice] * rng.uniform(0.75, 1.0)

    rates = halve(candidates, BASE, rate, first_s=0.5, time_left=lambda: 1.0)
    assert max(rates, key=lambda choice: rates[choice]) == fastest
    assert len(visits) < 3 * len(candidates)
    assert BASE in rates


def test_halving_ends_with_the_time_but_not_before_the_base_is_known():
    candidates = choices(BASE, 4)
    rates = halve(candidates, BASE, lambda choice, seconds: 1.0, first_s=0.5, time_left=lambda: -1.0)
    assert list(rates) == [BASE]


def test_choices_that_cannot_be_run_are_left_out():
    candidates = choices(BASE, 2)
    rates = halve(
        candidates, BASE, lambda c, s: None if c.layout == "default" else 1.0, first_s=0.5, time_left=lambda: 1.0
    )
    assert {choice.layout for choice in rates} == {"channels_last"}


def test_the_base_and_the_best_of_its_bits_survive_every_round():
    candidates = choices(BASE, 4)
    rates = {choice: 1.0 if choice.same_bits(BASE) else 2.0 for choice in candidates}
    rates[BASE] = 0.5
    kept = survivors(rates, BASE)
    assert BASE in kept
    assert any(choice.same_bits(BASE) and choice != BASE for choice in kept)


# --- remembered -------------------------------------------------------------------------------------------------------

FOUND = Outcome("2026-01-02", 100.0, 150.0, 200.0, {"instances": 2}, {"engine.threads": 2, "instances": 1})


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    return load_recipe("mnist", ["batch.replicas=2", "workload.data.source=generated"])


def test_what_was_measured_is_found_again_for_the_same_training_only(recipe):
    device = resolve_device("cpu")
    assert recall(recipe, device) is None
    path = remember(recipe, device, FOUND)
    assert recall(recipe, device) == FOUND
    assert recall(recipe_with(recipe, {"seed": 7, "train.length": "3up"}), device) == FOUND
    assert recall(recipe_with(recipe, {"batch.micro": 3}), device) is None
    path.write_text("{")
    assert recall(recipe, device) is None
    path.write_text(json.dumps({"format": 99}))
    assert recall(recipe, device) is None


def test_training_takes_what_keeps_the_bits_and_says_so(recipe, capsys):
    remember(recipe, resolve_device("cpu"), FOUND)
    assert tuner.tuned("mnist", ["seed=3"], recipe, None) == (["seed=3"], "2")
    assert "using instances 2, as tuned on 2026-01-02" in capsys.readouterr().err
    assert tuner.tuned("mnist", [], recipe, "1") == ([], "1")
    assert capsys.readouterr().err == ""


def test_training_changes_bits_only_where_the_recipe_asks(recipe):
    remember(recipe, resolve_device("cpu"), FOUND)
    asking = recipe_with(recipe, {"engine.tune_bits": True})
    assert tuner.tuned("mnist", [], asking, None) == (["engine.threads=2"], "1")
    assert tuner.tuned("mnist", [], recipe_with(recipe, {"engine.tune": "off"}), None) == ([], None)


def test_a_changed_batch_size_comes_with_all_of_them(recipe):
    found = Outcome("2026-01-02", 1, 1, 2, {}, {"batch.micro": 128, "batch.replicas": 1})
    remember(recipe, resolve_device("cpu"), found)
    asking = recipe_with(recipe, {"engine.tune_bits": True})
    overrides, _ = tuner.tuned("mnist", [], asking, None)
    tuned = load_recipe("mnist", ["batch.replicas=2", *overrides])
    assert (tuned.batch.micro, tuned.batch.accumulation, tuned.batch.replicas) == (128, 1, 1)
    assert tuned.batch.global_batch == recipe.batch.global_batch


@pytest.mark.slow
def test_tune_measures_for_real_remembers_and_writes_a_recipe(podium, tmp_path):
    small = ["workload.data.source=generated", "batch.micro=4", "batch.replicas=2", "engine.compile=false"]
    written = tmp_path / "mine.yaml"
    result = podium("tune", "mnist", *small, "--seconds", 4, "--write", written)
    assert result.returncode == 0, result.stderr
    assert "the recipe unchanged" in result.stdout
    assert "samples/s" in result.stdout
    assert "with the same bits" in result.stderr
    mine = load_recipe(str(written))
    assert mine.batch.global_batch == 8
    assert mine.workload.data.source == "generated"
    again = podium("tune", "mnist", *small, "--write", written)
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_a_damaged_recipe_ends_the_tuner_before_it_measures(podium):
    result = podium("tune", "mnist", "engine.threads=none")
    assert result.returncode == 2
    assert "engine.threads" in result.stderr


def test_counts_in_which_spans_cannot_lie_are_not_tried():
    assert useful_instances(8, 8) == [1, 2, 3, 4, 8]
    assert useful_instances(8, 8, Blocks(span=4)) == [1, 2, 4, 8]
    assert useful_instances(8, 3, Blocks(alike=True)) == [1, 2]
