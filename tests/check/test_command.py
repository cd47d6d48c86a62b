"""`podium check` through the real command."""

import pytest

from tests.support.processes import assert_user_error, podium_ended
from tests.support.recipes import TINY

PROMISES = [
    "the loss is finite",
    "an update repeats",
    "a replica does not depend on others",
    "no host wait in an update",
    "sums and counts add up",
    "trains",
    "same weights on 2 instances",
    "same weights on 3 instances",
    "same weights on 4 instances",
    "same weights after a kill, resumed on 4",
    "same weights cut into 2 stages",
]


@pytest.mark.slow
def test_a_shipped_recipe_keeps_every_promise(tmp_path):
    done = podium_ended(tmp_path, "check", *TINY["neuron"], "batch.micro=2", "--keep", "trials", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for promise in PROMISES:
        (row,) = [line for line in done.stdout.splitlines() if f"│ {promise} " in line]
        assert "│ yes " in row, row
    assert "every promise is kept" in done.stdout
    assert (tmp_path / "trials" / "trial-1" / "summary.json").exists()


@pytest.mark.slow
def test_trials_never_overwrite(tmp_path):
    (tmp_path / "mine").mkdir()
    assert_user_error(podium_ended(tmp_path, "check", "mnist", "--keep", "mine"), "mine: it already exists")
