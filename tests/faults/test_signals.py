"""Stopped by signals, by the clock, by a kill: a run says how to go on, and goes on to the same weights."""

import signal

import pytest

from podium import checkpoint
from podium.recipe import load_recipe
from podium.run import Run, open_run
from podium.train import train
from tests.conftest import TINY, assert_user_error
from tests.processes import podium_here, started

pytestmark = pytest.mark.slow

#: long enough to be met in the middle
LENGTH = "train.length=200up"
ENDLESS = "train.length=1000000up"
#: no checkpoint but the one asked for
UNSAVED = ["checkpoint.every=0", "checkpoint.best=false", "valid.every=0"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of a run nobody disturbs, by workload."""
    known: dict[str, str] = {}

    def weights(name: str) -> str:
        if name not in known:
            folder = tmp_path_factory.mktemp("straight") / "run"
            run = train(load_recipe(name, [*TINY[name][1:], LENGTH, *UNSAVED]), folder)
            known[name] = run.summary()["weights_sha256"]
        return known[name]

    return weights


def assert_resumable(done, run, reason: str) -> None:
    """Exit 75, saved where it stopped, one line that says how to go on."""
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert reason in line
    assert f"`podium resume {run.path.name}` continues" in line
    assert run.summary()["state"] == "interrupted"
    update = run.summary()["updates"]
    assert f"after update {update} " in line
    assert checkpoint.load_latest(run.checkpoints, pytest.fail).update == update > 0


@pytest.mark.parametrize(
    ("workload", "number"),
    [
        ("mnist", signal.SIGTERM),
        ("neuron", signal.SIGTERM),
        ("mnist", signal.SIGINT),
        ("neuron", signal.SIGUSR1),
    ],
)
def test_a_signal_saves_and_a_resume_ends_at_the_same_weights(workload, number, tmp_path, straight):
    with started("train", *TINY[workload], LENGTH, *UNSAVED, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(tmp_path / "run")
        done = podium.ended(by=number)
    run = open_run(tmp_path / "run")
    assert_resumable(done, run, f"stopped by {number.name}")
    assert run.summary()["updates"] < 200

    resumed = podium_here("resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert run.summary()["state"] == "done"
    assert run.summary()["weights_sha256"] == straight(workload)
    updates = [record["update"] for record in run.records()]
    assert updates == list(range(5, 201, 5))

    assert_user_error(podium_here("resume", tmp_path / "run"), "is complete: 200 of 200 updates are done")


@pytest.mark.parametrize("workload", sorted(TINY))
def test_a_killed_run_resumes_from_its_last_checkpoint_to_the_same_weights(workload, tmp_path, straight):
    saving = ["checkpoint.every=20up", "checkpoint.best=false", "valid.every=0"]
    run = Run(tmp_path / "run")
    with started("train", *TINY[workload], LENGTH, *saving, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(run.path, 11)  # past two checkpoints
        done = podium.ended(by=signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    assert run.summary()["state"] == "running"
    with run.metrics_file.open("a") as file:
        file.write('{"update": 39')  # as a kill in the middle of a line leaves it

    resumed = podium_here("resume", run.path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stderr
    assert run.summary()["state"] == "done"
    assert run.summary()["weights_sha256"] == straight(workload)
    assert [record["update"] for record in run.records()] == list(range(5, 201, 5))


def test_the_time_limit_saves_like_a_signal(podium, tmp_path):
    done = podium("train", *TINY["mnist"], ENDLESS, *UNSAVED, "train.time_limit=1s", "--out", "run")
    assert_resumable(done, open_run(tmp_path / "run"), "stopped by the time limit")


def test_a_second_interrupt_by_hand_stops_at_once(tmp_path):
    """The first one is noted in the middle of a validation that takes minutes; the second does not wait for it."""
    long_validation = ["workload.data.generated_test=10000000", "valid.every=3up", "engine.updates_per_call=1"]
    run = Run(tmp_path / "run")
    with started("train", *TINY["mnist"], ENDLESS, *long_validation, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(run.path, 2)
        podium.process.send_signal(signal.SIGINT)
        podium.until(lambda: "once more stops at once" in podium.stderr, "an answer to the first interrupt")
        podium.process.send_signal(signal.SIGTERM)  # one of another kind in between changes nothing
        podium.process.send_signal(signal.SIGINT)
        assert podium.process.wait(timeout=10) == 130
    assert "Traceback" not in podium.stderr
    assert checkpoint.checkpoint_paths(run.checkpoints) == []


def test_a_folder_being_trained_in_refuses_a_second_process(tmp_path):
    with started("train", *TINY["mnist"], ENDLESS, *UNSAVED, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(tmp_path / "run")
        assert_user_error(podium_here("resume", tmp_path / "run"), "is being trained by another process")
        assert_user_error(podium_here("train", *TINY["mnist"], "--out", tmp_path / "run"), "already holds a run")
        podium.until_records(tmp_path / "run", 20)  # and the first one goes on
