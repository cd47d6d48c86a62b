"""Suggestions come from the seed, the number and what earlier generations have come to, and from nothing else."""

import math
from statistics import median

import pytest

from podium.study.definition import study_from_tree
from podium.study.records import RunRecord
from podium.study.suggest import importances, suggest

SPACE = {"optim.lr": {"from": 1e-4, "to": 1e-1, "log": True}, "batch.micro": {"from": 8, "to": 64, "step": 8},
         "optim.name": ["adam", "sgd"]}  # fmt: skip


def study(method="tpe", **keys):
    tree = {
        "recipe": "neuron",
        "values": SPACE,
        "method": method,
        "generation": 4,
        "startup": 4,
        "budget": {"runs": 64},
    }
    return study_from_tree({**tree, **keys}, "here")


def record(point, values, value):
    return RunRecord(number=point, point=point, state="finished", values=values, seed=1, value=value)


def filled(defined, generations, order=list):
    """The records of some generations, told in some order."""
    records = {}
    for first in range(0, 4 * generations, 4):
        chosen = suggest(defined, records, range(first, first + 4))
        told = {point: record(point, values, abs(values["optim.lr"] - 5e-3)) for point, values in chosen}
        records = {point: {**records, **told}[point] for point in order([*records, *told])}
    return records


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_the_order_in_which_runs_were_told_changes_nothing(method):
    defined = study(method)
    forward, backward = filled(defined, 3), filled(defined, 3, order=lambda points: sorted(points, reverse=True))
    assert forward == backward
    assert suggest(defined, forward, [12, 13]) == suggest(defined, backward, [12, 13])


def test_results_of_the_same_generation_change_nothing():
    defined = study()
    records = filled(defined, 2)
    (eighth, ninth) = suggest(defined, records, [8, 9])
    early = {**records, 8: record(8, eighth[1], 1e-9)}
    assert suggest(defined, early, [9]) == [ninth]


def test_keys_may_be_given_in_another_order():
    swapped = study(values=dict(reversed(SPACE.items())))
    assert suggest(study(), {}, [0, 1]) == suggest(swapped, {}, [0, 1])


def test_values_are_within_what_was_asked_for_and_another_seed_gives_others():
    values = [values for _, values in suggest(study("random"), {}, range(16))]
    assert all(1e-4 <= one["optim.lr"] <= 1e-1 and one["batch.micro"] % 8 == 0 for one in values)
    assert {one["optim.name"] for one in values} == {"adam", "sgd"}
    assert values != [values for _, values in suggest(study("random", seed=2), {}, range(16))]


def test_tpe_comes_closer_to_the_best_than_chance_does():
    def distance(method):
        points = filled(study(method), 10).items()
        return median(abs(math.log(run.values["optim.lr"] / 5e-3)) for point, run in points if point >= 20)

    assert distance("tpe") < distance("random")


def test_a_choice_over_a_constraint_is_told_to_the_sampler():
    defined = study(constraints=[{"metric": "updates", "at_most": 10}])
    records = filled(defined, 3)
    bad = {point: run.but(constraints={"updates": 1.0 if run.values["optim.name"] == "adam" else -1.0})
           for point, run in records.items()}  # fmt: skip
    names = [values["optim.name"] for _, values in suggest(defined, bad, range(12, 28))]
    assert names.count("sgd") > names.count("adam")


def test_importances_name_the_key_that_matters():
    found = importances(study(), filled(study(), 8))
    assert set(found) == set(SPACE)
    assert max(found, key=found.get) == "optim.lr"
    assert importances(study(), {}) == {}
