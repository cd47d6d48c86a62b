"""Plans grade themselves: a plan is found again by its training, and a damaged file is told or skipped."""

import pytest

from podium.errors import UserError
from podium.machine.state_folder import state_folder
from podium.plan import history
from podium.plan.intervals import Interval

SUMMARY = {
    "state": "done", "recipe_sha256": "ab" * 32, "topology": {"instances": 2, "hosts": 1}, "samples_per_second": 110.0,
    "seconds": {"total": 21.0, "report": 1.0}, "memory_peak_bytes": 10**9,
}  # fmt: skip
PREDICTED = {
    "samples_per_second": Interval(100.0, 90.0, 120.0),
    "total_s": Interval(10.0, 9.0, 12.0),
    "memory": Interval(1e9, 9e8, 1.1e9),
}


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path))


def test_a_planned_training_is_compared_with_its_plan():
    history.keep_plan("ab" * 32, 2, 1, PREDICTED)
    graded = history.grade(SUMMARY, "runs/mnist")
    assert graded is not None
    found = {one.what: (round(one.error, 3), one.inside) for one in graded.grades}
    assert found == {"samples_per_second": (-0.091, True), "total_s": (-0.5, False), "memory": (0.0, True)}
    assert history.history() == [graded]


def test_other_trainings_are_not_compared():
    history.keep_plan("ab" * 32, 2, 1, PREDICTED)
    other = (
        {"recipe_sha256": "cd" * 32},
        {"topology": {"instances": 4}},
        {"state": "interrupted"},
        {"stopped_early": True},
    )
    assert [history.grade({**SUMMARY, **change}, "run") for change in other] == [None] * 4
    assert history.history() == []


def test_damaged_plans_are_told_and_damaged_lines_left_out():
    history.keep_plan("ab" * 32, 2, 1, PREDICTED)
    assert history.grade(SUMMARY, "run") is not None
    (plan,) = state_folder("plans").glob("*.json")
    for text in ("{", '{"predicted": 3}', '{"predicted": {"memory": [1]}}'):
        plan.write_text(text)
        with pytest.raises(UserError, match=r"is damaged: .*plan again"):
            history.grade(SUMMARY, "run")
    lines = state_folder("plans", "history.jsonl")
    lines.write_bytes(b'{"when": 1}\n\xff\n' + lines.read_bytes() + b'{"half')
    assert len(history.history()) == 1
