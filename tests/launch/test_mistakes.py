"""A user's mistake that only the instances find ends a launch at once, with one sentence and no restart."""

import subprocess
import sys

import pytest

MISSING_DATA = ["mnist", "workload.data.path=missing", "batch.replicas=2", "--instances", "2"]

#: `podium`, but the recipe is gone by the time that instances read it
VANISHING = """
import sys
from pathlib import Path
from podium.cli import main
from podium.launch import agent
launch = agent.launch
def without_recipe(*arguments):
    Path("my.yaml").unlink()
    launch(*arguments)
agent.launch = without_recipe
sys.argv = ["podium", "train", "my.yaml", "--instances", "2"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("found_when", ["preparing", "reading the recipe"])
def test_a_mistake_that_instances_find_is_told_once_and_ends_the_launch(podium, tmp_path, found_when):
    if found_when == "preparing":
        done = podium("train", *MISSING_DATA)
        sentence = "podium: workload.data.path = missing: expected a folder that exists"
    else:
        (tmp_path / "my.yaml").write_text("base: mnist\nbatch: {replicas: 2}\n")
        done = subprocess.run([sys.executable, "-c", VANISHING], cwd=tmp_path, capture_output=True, text=True)
        sentence = "podium: recipe file my.yaml does not exist"
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, len(lines), done.stdout) == (2, 1, "")
    assert lines[0].startswith(sentence)
    assert not (tmp_path / "runs").exists()
