"""What is done with the checkpoints of a run: all of them validated, averaged, gone back to."""

import pytest
import torch

from podium.checkpoints import reading
from podium.runs.folder import Run
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

RECIPE = [*TINY["cnn"], "checkpoint.every=16up", "checkpoint.keep=4", "valid.every=16up", "train.length=64up",
          "workload.data.test_samples=48"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    from podium.recipe.loading import load_recipe
    from podium.train import train

    return train(
        load_recipe(RECIPE[0], [*RECIPE[1:], "checkpoint.best=false"]), tmp_path_factory.mktemp("after") / "run"
    )


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table, printed narrow or wide."""
    return [line.replace("┃", "│").strip("│ \n").split("│") for line in text.splitlines() if "│" in line or "┃" in line]


def test_all_checkpoints_are_validated_and_say_what_training_said(run):
    done = podium_here("validate", run.path, "--checkpoint", "all")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in row] for row in rows_of(done.stdout)]
    said = {str(record["update"]): record["valid/loss"] for record in run.records() if "valid/loss" in record}
    found = {row[0]: float(row[1]) for row in rows if row[0].isdecimal()}
    assert list(found) == ["16", "32", "48", "64"]
    for update, loss in found.items():
        assert loss == pytest.approx(said[update], rel=1e-4)


def test_the_average_of_checkpoints_is_written_validated_and_usable(run):
    done = podium_here("average", run.path, "--last", 3, "--method", "exponential", "--decay", 0.5)
    assert done.returncode == 0, done.stderr
    assert "exponential of these" in done.stdout
    (path,) = reading.checkpoint_paths(run.average)
    found = reading.load(path)
    assert found.state["averaged"] == [32, 48, 64]
    three = [reading.load(reading.path_of(run.checkpoints, update)).weights for update in (32, 48, 64)]
    for name, tensor in found.weights.items():
        if tensor.is_floating_point():
            expected = (three[0][name].double() / 2 + three[1][name].double() / 2) / 2 + three[2][name].double() / 2
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
    done = podium_here("validate", run.path, "--checkpoint", "average")
    assert done.returncode == 0, done.stderr
    more = podium_here("average", run.path, "--last", 9)
    assert more.returncode == 0
    assert "has 4 checkpoints, not 9: averaging what there is" in more.stderr
    assert reading.load(path).state["averaged"] == [16, 32, 48, 64]
    assert_user_error(podium_here("average", run.path, "--method", "median"), "expected mean or exponential")


def test_a_run_goes_back_to_any_checkpoint_and_comes_to_the_same_end(run):
    weights = run.summary()["weights_sha256"]
    assert_user_error(
        podium_here("resume", run.path, "--checkpoint", 17), "has no checkpoint of update 17 (there are: 16,"
    )
    done = podium_here("resume", run.path, "--checkpoint", 32)
    assert done.returncode == 0, done.stderr
    assert "after update 32 of 64" in done.stderr
    assert run.summary()["weights_sha256"] == weights
    assert [record["update"] for record in run.records() if "valid/loss" in record] == [16, 32, 48, 64]
