"""`podium rehearse`: real trainings, disturbed as on a cluster, with the weights of one that nothing happened to."""

import re
import sys

import pytest

from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow
RECIPE = [*TINY["mnist"], "batch.replicas=2", "batch.micro=4"]


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "ssh"])
def test_a_job_survives_its_rehearsal_and_what_could_not_be_rehearsed_is_told(target, tmp_path):
    done = podium_here("rehearse", target, *RECIPE, "--seconds", 3, "--keep", tmp_path / "kept")
    logs = "\n".join(path.read_text() for path in (tmp_path / "kept").rglob("*log") if path.is_file())
    assert done.returncode == 0, done.stdout + done.stderr + logs
    for event in ("preempted", "timed out", "loses a node"):
        assert re.search(rf"{event} +│ survives", done.stdout), done.stdout
    assert re.search(r"weights at the end +│ the same", done.stdout)
    assert "2 hosts × 1" in done.stdout
    assert "not rehearsed: " in done.stdout
    assert "ready to submit" in done.stdout


def test_a_site_whose_settings_change_the_weights_is_found_out(tmp_path):
    """Its variables choose other instructions for torch than this machine's."""
    (tmp_path / "site.yaml").write_text("environment: {ATEN_CPU_CAPABILITY: default}\n")
    done = podium_here("rehearse", "kubernetes", *RECIPE, "--seconds", 2, "--site", tmp_path / "site.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"weights at the end +│ others", done.stdout), done.stdout
    assert "not ready to submit" in done.stdout


def test_a_recipe_that_does_not_train_at_all_is_one_sentence(tmp_path):
    words = [*RECIPE, "workload.data.source=files", "workload.data.path=/nowhere"]
    assert_user_error(podium_here("rehearse", "slurm", *words), "does not train here", "/nowhere")
    taken = podium_here("rehearse", "ssh", *RECIPE, "--keep", sys.prefix)
    assert_user_error(taken, "already exists")
