"""What a study is: grids, seeds and budgets, and one sentence for each mistake."""

import pytest

from podium.errors import UserError
from podium.recipe.reading import read_yaml
from podium.study.definition import check_at_once, check_values, run_recipe, study_from_tree
from podium.study.folder import StudyFolder


def study(**keys):
    return study_from_tree({"recipe": "neuron", "values": {"optim.lr": [1e-3, 2e-3]}, **keys}, "here")


def test_the_key_that_is_given_last_changes_fastest_and_seeds_count_from_that_of_the_recipe():
    given = study(values={"optim.lr": [1e-3, 2e-3], "batch.replicas": [1, 2]}, seeds=2)
    pairs = [(values["optim.lr"], values["batch.replicas"]) for values in given.grid()]
    assert pairs == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    assert given.run_seeds(7) == [7, 8]


def test_a_budget_of_runs_counts_seeds():
    assert study(seeds=3, budget={"runs": 5}).num_points == 1
    assert study(method="random", budget={"runs": 12}, seeds=2).num_points == 6


def test_a_saved_definition_is_read_as_it_was_with_its_keys_in_their_order(tmp_path):
    given = study(
        values={"optim.lr": {"from": 1e-4, "to": 1e-2, "log": True}, "batch.micro": [8, 16]},
        method="tpe",
        budget={"runs": 8, "time": "2h"},
        halving={"first": "1ep"},
        constraints=[{"metric": "num_parameters", "at_most": 1e6}],
    )
    folder = StudyFolder(tmp_path)
    folder.write_definition(given, check_values(given), ["podium"])
    assert folder.definition() == given
    assert list(read_yaml(folder.definition_file)["values"]) == ["optim.lr", "batch.micro"]


def test_threads_are_settled_by_the_study_not_by_the_cores_that_a_run_gets():
    assert run_recipe(study(), {"optim.lr": 1e-3}, 5).engine.threads == 1
    assert run_recipe(study(threads=2), {}, None).engine.threads == 2
    assert run_recipe(study(set={"engine.threads": 3}), {}, None).engine.threads == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"values": {}}, "nothing varies"),
        ({"values": {"optim.lr": []}}, "values.optim.lr is empty"),
        ({"values": {"optim.lr": [1, 1]}}, "has 1 twice"),
        ({"values": {"optim.lr": {"from": 1e-4, "to": 1e-2}}}, "a grid needs a list"),
        ({"values": {"optim.lr": {"from": 1, "to": 1}}, "method": "tpe", "budget": {"runs": 2}}, "a larger number"),
        ({"values": {"optim.lr": {"from": 0, "to": 1, "log": True}}, "method": "tpe"}, "above 0 with log"),
        ({"set": {"optim.lr": 1}}, "both in set and in values"),
        ({"method": "random"}, "budget.runs is missing"),
        ({"metric": "valid/accuracy"}, "is less or more of valid/accuracy better"),
        ({"seeds": [1, 1]}, "expected different seeds"),
        ({"seeds": 3, "budget": {"runs": 2}}, "expected 3 at least"),
        ({"constraints": [{"metric": "updates"}]}, "one of at_most and at_least"),
        ({"metrik": "valid/loss"}, "metrik"),
        ({"halving": {"first": "0ep"}}, "longer than 0"),
        ({"values": {"optim.lr": list(range(1, 400)), "batch.micro": list(range(1, 400))}}, "at most 100,000 runs"),
    ],
)
def test_mistakes_are_told_in_one_sentence(keys, said):
    with pytest.raises(UserError) as caught:
        study(**keys)
    assert said in str(caught.value)


@pytest.mark.parametrize("values", [{"optim.lrr": [1, 2]}, {"optim.lr": [1e-3, "fast"]}])
def test_values_that_no_recipe_takes_are_found_before_anything_is_trained(values):
    with pytest.raises(UserError, match="lr"):
        check_values(study(values=values))


def test_how_many_go_at_once_is_a_number_or_auto():
    assert (check_at_once("3"), check_at_once("auto")) == (3, None)
    for text in ("0", "-1", "many", "5000"):
        with pytest.raises(UserError, match="--at-once"):
            check_at_once(text)
