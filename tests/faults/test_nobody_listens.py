"""Output that cannot be written is dropped: a pipe without a reader, a full disk, a closed stream end no training."""

import os
import subprocess
from pathlib import Path

import pytest

from podium.runs.folder import Run
from tests.support.processes import DEADLINE_S, podium_command
from tests.support.recipes import TINY
from tests.support.warm import WARM

pytestmark = pytest.mark.slow

RECIPE = [*TINY["mnist"], "batch.replicas=2"]
NUM_INSTANCES = pytest.mark.parametrize("num_instances", [1, 2])
FULL = Path("/dev/full")


def log_of(run: Run) -> str:
    return run.instance_log(0).read_text()


@NUM_INSTANCES
def test_a_pipe_whose_reader_has_gone_ends_no_training(num_instances, tmp_path, weights_alone):
    """As `podium train … 2>&1 | head -1`, or a `tee` that was killed."""
    reading, writing = os.pipe()
    process = WARM.start(("train", *RECIPE, "--instances", num_instances, "--out", "run"), tmp_path, writing, writing)
    os.close(writing)
    with process, os.fdopen(reading, "rb") as pipe:
        assert pipe.readline()
        pipe.close()
        assert process.wait(DEADLINE_S) == 0
    run = Run(tmp_path / "run")
    assert run.summary()["state"] == "done"
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert "standard error cannot be written (nobody reads it): what goes there is dropped" in log_of(run)
    assert "Traceback" not in log_of(run)


@NUM_INSTANCES
def test_a_full_disk_behind_both_streams_ends_no_training(num_instances, tmp_path, weights_alone):
    with FULL.open("wb") as full:
        process = WARM.start(
            ("train", *RECIPE, "--instances", num_instances, "--out", "run"), tmp_path, full.fileno(), full.fileno()
        )
        with process:
            assert process.wait(DEADLINE_S) == 0
    run = Run(tmp_path / "run")
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert log_of(run).count("standard error cannot be written (the disk is full)") == 1


def test_a_command_as_a_shell_starts_it_leaves_no_traceback_on_a_full_disk(tmp_path):
    """From the start of Python to its very end, where it writes what is left."""
    with FULL.open("wb") as full:
        for words, code in ((["train", *RECIPE, "--out", "run"], 0), (["show", "run"], 2), (["--version"], 2)):
            done = subprocess.run(
                podium_command(*words), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
            )
            assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (code, False, False)
            assert done.stderr.count("the disk is full") == 1
    assert Run(tmp_path / "run").summary()["state"] == "done"


@pytest.mark.parametrize("words", [["show", "mnist"], ["recipes"], ["topology", "mnist"], ["doctor"], ["--help"]])
def test_results_that_are_lost_are_a_failure_and_a_reader_that_leaves_is_none(words, tmp_path):
    with FULL.open("wb") as full, (tmp_path / "errors").open("wb") as errors:
        with WARM.start(tuple(words), tmp_path, full.fileno(), errors.fileno()) as process:
            assert process.wait(DEADLINE_S) == 2
        assert (tmp_path / "errors").read_text() == (
            "podium: the results could not be written to standard output: the disk is full\n"
        )
        reading, writing = os.pipe()
        os.close(reading)
        with WARM.start(tuple(words), tmp_path, writing, errors.fileno()) as process:
            os.close(writing)
            assert process.wait(DEADLINE_S) == 0
    assert len((tmp_path / "errors").read_text().splitlines()) == 1


def test_streams_that_were_closed_from_the_start_do_no_harm(tmp_path):
    """`>&- 2>&-`: the numbers of the streams are free for the next files that are opened."""
    words = ["train", *TINY["mnist"], "--out", "run"]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&- 2>&-', "sh", *podium_command(*words)], cwd=tmp_path, timeout=DEADLINE_S
    )
    assert done.returncode == 0
    run = Run(tmp_path / "run")
    assert run.summary()["state"] == "done"
    assert [record["update"] for record in run.records()]


def test_a_stream_in_another_encoding_shows_what_it_cannot_write(tmp_path):
    done = subprocess.run(
        podium_command("topology", "mnist"), cwd=tmp_path, capture_output=True, timeout=DEADLINE_S,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
