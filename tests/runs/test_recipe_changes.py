"""A recipe that was edited since the last checkpoint: named key by key, continued with only where that is wanted."""

import shutil

import pytest

from podium.checkpoints import reading
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run, differing_conditions
from podium.runs.recipe_changes import changed_keys
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

SHORT = [*TINY["mnist"], "train.length=10up", "checkpoint.every=5up", "checkpoint.keep=9", "schedule.warmup=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert podium_here("train", *SHORT, "--out", run).returncode == 0
    shutil.rmtree(run / "checkpoints" / "update-00000010")
    return run


@pytest.fixture
def run(trained, tmp_path) -> Run:
    shutil.copytree(trained, tmp_path / "run")
    return Run(tmp_path / "run")


def edit(run: Run, before: str, after: str) -> None:
    text = run.recipe_file.read_text()
    assert before in text
    run.recipe_file.write_text(text.replace(before, after))


def test_an_edited_recipe_is_refused_by_its_keys_and_accepted_where_asked(run):
    seed = "seed: 1\n"
    edit(run, seed, "seed: 2\n")
    done = podium_here("resume", run.path)
    assert_user_error(done, "has changed since update 5 was saved: seed was 1, is 2;", "--accept-changes")
    assert [path.name for path in reading.checkpoint_paths(run.checkpoints)] == ["update-00000005"]

    done = podium_here("resume", run.path, "--accept-changes")
    assert done.returncode == 0, done.stderr
    assert "seed was 1, is 2; the weights are no longer those of one recipe" in done.stderr
    found = reading.load_latest(run.checkpoints, pytest.fail)
    assert found.state["recipe"]["seed"] == 2


def test_how_a_training_is_carried_out_may_change(run):
    edit(run, "recompute: false", "recompute: true")
    assert podium_here("resume", run.path).returncode == 0


def test_a_length_below_the_progress_is_one_sentence(run):
    edit(run, "length: 10up", "length: 3up")
    done = podium_here("resume", run.path, "--accept-changes")
    assert_user_error(done, "train.length = 3up ends at update 3", "has made 5 updates", "--checkpoint")


def test_checkpoints_of_before_are_compared_by_their_checksum():
    recipe = load_recipe(SHORT[0], SHORT[1:])
    assert changed_keys(recipe, {"recipe_sha256": recipe.sha256()}) == []
    assert changed_keys(recipe, {"recipe_sha256": "0" * 64}) == ["keys that its checkpoints do not name"]
    assert changed_keys(recipe, {}) == []


def test_keys_that_are_new_in_this_version_are_no_change():
    recipe = load_recipe(SHORT[0], SHORT[1:])
    tree = recipe.tree()
    del tree["engine"]["tune_bits"]
    assert changed_keys(recipe, {"recipe": tree}) == []
    tree["engine"]["of_another_version"] = 1
    assert "engine.of_another_version was 1, is not set" in changed_keys(recipe, {"recipe": tree})


def test_variables_that_change_results_are_told_when_they_differ(run, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("MKL_VERBOSE", "0")
    done = podium_here("resume", run.path)
    assert done.returncode == 0, done.stderr
    assert "bits may differ from an uninterrupted run, as these differ: MKL_CBWR not set → COMPATIBLE\n" in done.stderr


def test_a_run_of_before_they_were_recorded_is_not_warned_about():
    assert differing_conditions({"torch": "2"}, {"torch": "2", "numerics_variables": {"MKL_CBWR": "AVX2"}}) == []
