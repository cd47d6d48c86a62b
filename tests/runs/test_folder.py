"""What a run folder says of itself, without training in it."""

import os

import pytest

from podium.launch.environment import COMMAND
from podium.recipe.loading import load_recipe, to_yaml
from podium.runs.folder import Run, environment, write_json
from tests.support.processes import assert_user_error, podium_here


@pytest.fixture
def run(tmp_path) -> Run:
    """A run whose process is gone without a word."""
    run = Run(tmp_path)
    run.recipe_file.write_text(to_yaml(load_recipe("mnist").tree()))
    write_json(run.environment_file, {"command": ["/usr/bin/podium", "train", "mnist", "--out", "my runs/a"]})
    run.write_summary({"state": "running", "updates": 0, "total_updates": 9000})  # as at its start
    run.metrics_file.write_text('{"update": 600}\n{"update": 1200}\n{"upd')
    return run


@pytest.mark.parametrize("state", ["running", "done", "interrupted", "failed"])
def test_a_run_that_says_running_but_is_not_locked_was_killed(run, state):
    run.write_summary({"state": state})
    with run.locked():
        assert run.state() == state
    assert run.state() == ("killed" if state == "running" else state)
    assert run.summary()["state"] == state


def test_show_prints_the_recipe_of_a_run_after_where_it_stands(run):
    done = podium_here("show", run.path)
    assert done.returncode == 0, done.stderr
    first, recipe = done.stdout.split("\n", 1)
    assert first.startswith(f"# {run.path}: killed after update 1,200 of 9,000, as of 20")
    assert recipe == run.recipe_file.read_text()
    assert_user_error(podium_here("show", run.path, "optim.lr=1"), "is a run", "leave out optim.lr=1")


def test_the_command_is_the_one_a_person_typed(run, monkeypatch):
    assert run.command() == ["podium", "train", "mnist", "--out", "my runs/a"]
    # an instance knows the command of its launcher
    monkeypatch.setitem(os.environ, COMMAND, '["podium", "train", "mnist", "--instances", "2"]')
    import torch

    write_json(run.environment_file, environment(1, torch.device("cpu")))
    assert run.command() == ["podium", "train", "mnist", "--instances", "2"]
