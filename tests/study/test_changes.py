"""A study may grow; whatever would mix results that do not belong together is refused with what differs."""

import pytest

from podium.errors import UserError
from podium.study.changes import check_same_study
from podium.study.definition import check_values, study_from_tree
from podium.study.folder import StudyFolder

GRID = {"recipe": "neuron", "values": {"optim.lr": [1e-3, 2e-3]}, "set": {"train.length": "10ep"}}
TPE = {**GRID, "method": "tpe", "values": {"optim.lr": {"from": 1e-4, "to": 1e-2}}, "budget": {"runs": 8}}


def check(tmp_path, before, now, code="same"):
    folder, study = StudyFolder(tmp_path / "study"), study_from_tree(before, "before")
    folder.write_definition(study, check_values(study), ["podium"])
    folder.write_facts(workload="same")
    study = study_from_tree(now, "now")
    check_same_study(folder, study, check_values(study).tree(), code)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (GRID, GRID),
        (GRID, {**GRID, "values": {"optim.lr": [5e-4, 1e-3, 2e-3]}}),
        (GRID, {**GRID, "seeds": 3}),
        (GRID, {**GRID, "set": {"train.length": "20ep"}}),
        (GRID, {**GRID, "metric": "train/loss", "take": "last"}),
        (GRID, {**GRID, "budget": {"time": "1h"}, "target": 0.1}),
        (GRID, {**GRID, "set": {"train.length": "10ep", "log.report": False}}),
        (TPE, {**TPE, "budget": {"runs": 16}}),
    ],
)
def test_what_a_study_may_grow_to(before, now, tmp_path):
    check(tmp_path, before, now)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (GRID, {**GRID, "values": {"optim.lr": [1e-3]}, "seeds": 2}, "optim.lr had 0.002, and has it no more"),
        (GRID, {**GRID, "values": {**GRID["values"], "batch.micro": [4, 8]}}, "batch.micro was not varied"),
        (GRID, {**GRID, "set": {"train.length": "5ep"}}, "train.length was 10ep, is 5ep: runs can only grow"),
        (GRID, {**GRID, "set": {"train.length": "500up"}}, "in the same unit"),
        (GRID, {**GRID, "set": {**GRID["set"], "batch.micro": 4}}, "batch.micro was"),
        (GRID, {**GRID, "recipe": "mnist"}, 'recipe was "neuron", is "mnist"'),
        (GRID, {**GRID, "threads": 2}, "threads was 1, is 2"),
        ({**GRID, "seeds": 3}, {**GRID, "seeds": 2}, "seeds was 3, is 2"),
        (TPE, {**TPE, "seed": 2}, "seed was 1, is 2"),
        (TPE, {**TPE, "metric": "train/loss"}, 'metric was "valid/loss", is "train/loss"'),
        (TPE, {**TPE, "values": {"optim.lr": {"from": 1e-4, "to": 1e-1}}}, "optim.lr was"),
        (TPE, {**TPE, "set": {"train.length": "20ep"}}, "chosen by the shorter runs"),
        (TPE, {**TPE, "budget": {"runs": 4}}, "it has 8 choices of values, and would have 4"),
    ],
)
def test_what_differs_is_named(before, now, said, tmp_path):
    with pytest.raises(UserError) as caught:
        check(tmp_path, before, now)
    assert said in str(caught.value)
    assert "choose another folder with --out" in str(caught.value)


def test_changed_code_of_a_workload_is_another_study(tmp_path):
    with pytest.raises(UserError, match="the code of the workload has changed"):
        check(tmp_path, GRID, GRID, code="edited")
