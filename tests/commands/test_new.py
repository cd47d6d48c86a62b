"""`podium new` writes a folder that trains at once and whose test passes; `podium workloads` lists what there is."""

import subprocess
import sys

import pytest

from podium.commands.new import KINDS
from podium.runs.folder import Run
from tests.support.processes import assert_user_error, podium_here, run_files


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_workload_trains_at_once_and_learns(kind, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    assert podium_here("new", f"my_{kind}", "--like", kind).returncode == 0
    folder = tmp_path / f"my_{kind}"
    assert run_files(folder) == sorted(["README.md", f"my_{kind}.py", f"my_{kind}.yaml", f"test_my_{kind}.py"])
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "NAME" not in text
    assert "CLASS" not in text
    monkeypatch.chdir(folder)
    quick = ["workload.data.samples=400", "train.length=2ep", "log.tensorboard=false", "engine.threads=1"]
    done = podium_here("train", f"my_{kind}.yaml", *quick, "--out", "run")
    assert done.returncode == 0, done.stderr
    losses = [record["valid/loss"] for record in Run(folder / "run").records() if "valid/loss" in record]
    assert losses[-1] < losses[0]
    assert list((folder / "run" / "pictures").glob("*.png"))


@pytest.mark.slow
def test_the_test_of_a_new_workload_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    podium_here("new", "spirals", "--like", "classification")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "spirals",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_a_name_that_cannot_be_a_module_or_is_taken_is_told_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, said in (("my-model", "cannot be the name"), ("random", "something else"), ("mnist", "something else")):
        assert_user_error(podium_here("new", name), said)
    assert_user_error(podium_here("new", "fine", "--like", "regresion"), "did you mean regression?")
    assert run_files(tmp_path) == []
    (tmp_path / "taken").mkdir()
    assert_user_error(podium_here("new", "taken"), "already exists")


def test_shipped_workloads_are_listed_with_where_they_come_from():
    shown = podium_here("workloads").stdout
    for name in ("bert", "cosmology", "neuron"):
        assert name in shown
    assert "Podium" in shown
    assert "mine.py" in shown
