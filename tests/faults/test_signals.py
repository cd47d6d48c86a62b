"""Stopped by signals, by the clock, by a kill: a run says how to go on, and goes on to the same weights."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from podium.checkpoints import reading
from podium.distributed.instances import Instances
from podium.errors import Interrupted, UserError
from podium.machine.cache_folder import cache_folder
from podium.runs.folder import Run, open_run
from podium.training.stop_request import StopRequest
from podium.workloads.neuron.simulator.simulate import VERSION
from tests.support.processes import (
    DEADLINE_S,
    assert_user_error,
    podium_command,
    podium_here,
    run_files,
    sentence,
    started,
    until,
)
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow

#: long enough to be met in the middle
LENGTH = "train.length=200up"
ENDLESS = "train.length=1000000up"
#: no checkpoint but the one asked for
UNSAVED = ["checkpoint.every=0", "checkpoint.best=false", "valid.every=0"]


@pytest.fixture
def straight(weights_alone):
    """The weights of a run nobody disturbs, by workload."""
    return lambda workload: weights_alone([*TINY[workload], LENGTH, *UNSAVED])


def assert_resumable(done, run, reason: str) -> None:
    """Exit 75, saved where it stopped, one line that says how to go on."""
    assert done.returncode == 75, done.stderr
    line = sentence(done.stderr)
    assert reason in line
    assert f"`podium resume {run.path.name}` continues" in line
    assert run.summary()["state"] == "interrupted"
    update = run.summary()["updates"]
    assert f"after update {update} " in line
    assert reading.load_latest(run.checkpoints, pytest.fail).update == update > 0


@pytest.mark.parametrize(
    ("workload", "number"),
    [
        ("mnist", signal.SIGTERM),
        ("neuron", signal.SIGTERM),
        ("mnist", signal.SIGINT),
        ("neuron", signal.SIGUSR1),
        ("mnist", signal.SIGHUP),
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


@pytest.mark.parametrize("num_instances", [1, 2])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_a_terminal_that_is_closed_saves_unless_that_is_ignored(ignored, num_instances, tmp_path):
    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    command = podium_command(
        "train", *TINY["mnist"], LENGTH, "batch.replicas=2", "--instances", num_instances, "--out", "run"
    )
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=take_terminal,
    ) as process:  # fmt: skip
        try:
            os.close(theirs)
            metrics, seen = tmp_path / "run" / "metrics.jsonl", []

            def recorded() -> bool:
                with suppress(OSError):  # what is not read would stop those that write
                    seen.append(os.read(ours, 2**16))
                assert process.poll() is None, b"".join(seen).decode()
                return metrics.exists() and metrics.read_bytes().count(b"\n") >= 2

            until(recorded, "records")
            os.close(ours)
            assert process.wait(DEADLINE_S) == (0 if ignored else 75)
        finally:
            process.kill()
    run = open_run(tmp_path / "run")
    assert run.summary()["state"] == ("done" if ignored else "interrupted")
    assert reading.load_latest(run.checkpoints, pytest.fail).update == run.summary()["updates"] > 0


@pytest.mark.parametrize("num_instances", [1, 2])
def test_nohup_lets_a_run_go_on(num_instances, tmp_path):
    args = ["train", *TINY["mnist"], LENGTH, "batch.replicas=2", "--instances", num_instances, "--out", "run"]
    with started(*args, cwd=tmp_path, under=["nohup"]) as podium:
        podium.until_records(tmp_path / "run")
        for process in psutil.Process(podium.process.pid).children(recursive=True):
            process.send_signal(signal.SIGHUP)
        done = podium.ended(by=signal.SIGHUP)
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "run").summary()["state"] == "done"


@pytest.mark.parametrize("workload", sorted(TINY))
def test_a_killed_run_resumes_from_its_last_checkpoint_to_the_same_weights(workload, tmp_path, weights_alone):
    saving = ["checkpoint.every=10up", "checkpoint.best=false", "valid.every=0", "train.length=100up"]
    run = Run(tmp_path / "run")
    with started("train", *TINY[workload], *saving, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(run.path, 5)  # past two checkpoints
        done = podium.ended(by=signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    assert run.summary()["state"] == "running"
    with run.metrics_file.open("a") as file:
        file.write('{"update": 29')  # as a kill in the middle of a line leaves it

    resumed = podium_here("resume", run.path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stderr
    assert run.summary()["state"] == "done"
    assert run.summary()["weights_sha256"] == weights_alone([*TINY[workload], "train.length=100up", *UNSAVED])
    assert [record["update"] for record in run.records()] == list(range(5, 101, 5))


@pytest.mark.parametrize("more", [[], ["batch.replicas=2", "--instances", "2"]], ids=["alone", "2 instances"])
def test_the_time_limit_counts_from_the_start_of_the_process_and_saves_like_a_signal(podium, tmp_path, more):
    """Long over when training begins: every start makes one update, so that starting again and again gets on."""
    done = podium("train", *TINY["mnist"], ENDLESS, *UNSAVED, *more, "train.time_limit=0.1s", "--out", "run")
    run = open_run(tmp_path / "run")
    assert_resumable(done, run, "stopped by the time limit")
    assert run.summary()["updates"] == 1


def test_the_time_limit_counts_from_the_start_of_the_process_that_is_named():
    age_s = time.time() - psutil.Process().create_time()
    for process, limit_s, reason in [
        (os.getpid(), age_s / 2, "the time limit"),
        (os.getpid(), age_s + 600, None),
        (None, age_s / 2 + 600, None),
    ]:
        stop = StopRequest(process)
        stop.limit_to(limit_s)
        assert stop.reason == reason


# --- before the first update ----------------------------------------------------------------------------------------

SIMULATED = ["workload.data.source=simulated", "workload.data.samples=240"]
STARTS_AGAIN = "before the first update; nothing was lost: the same command starts it again"


@contextmanager
def data_withheld() -> Iterator[None]:
    """Whoever needs the simulated cells waits for them, as if another process were making them."""
    folder = cache_folder("neuron", f"v{VERSION}-seed1-240")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def waiting_for_data(pid: int) -> set[int]:
    """Those of the process and its children that wait for a lock."""
    family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return family & {int(words[5]) for words in waiting}


def listening(pid: int) -> bool:
    """Whether a handler of SIGUSR1 is there: the first thing that a command does."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def loading_torch(pid: int) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def simulating(pid: int) -> bool:
    return any(path.is_file() for path in cache_folder("neuron").glob(".v*/.*.data.h5.*"))


MOMENTS = {
    "listening": listening,
    "loading": loading_torch,
    "waiting": waiting_for_data,
    "simulating": simulating,
}


def assert_nothing_is_left(done, folder: Path, number: signal.Signals) -> None:
    assert done.returncode == 75, done.stderr
    line = sentence(done.stderr)
    assert line.endswith(f"stopped by {number.name} {STARTS_AGAIN}")
    assert all(name.startswith("stderr-") for name in run_files(folder))
    assert all(name.endswith(".lock") or not name.startswith(".") for name in run_files(cache_folder("neuron")))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("listening", signal.SIGTERM),
        ("loading", signal.SIGUSR1),
        ("loading", signal.SIGINT),
        ("waiting", signal.SIGTERM),
        ("waiting", signal.SIGINT),
        ("simulating", signal.SIGUSR1),
    ],
)
def test_a_signal_before_there_is_a_run_leaves_nothing_behind(moment, number, tmp_path):
    many = ["workload.data.samples=50000"] if moment == "simulating" else []
    args = ["train", *TINY["neuron"], *SIMULATED, *many, "--out", "run"]
    afresh = [] if moment in ("listening", "loading") else None
    with data_withheld(), started(*args, cwd=tmp_path, under=afresh) as podium:
        podium.until(lambda: MOMENTS[moment](podium.process.pid), moment)
        done = podium.ended(by=number)
    assert_nothing_is_left(done, tmp_path, number)


@pytest.mark.parametrize("moment", ["listening", "waiting"])
def test_a_signal_to_the_launcher_before_there_is_a_run_leaves_nothing_behind(moment, tmp_path):
    args = ["train", *TINY["neuron"], *SIMULATED, "batch.replicas=2", "--instances", 2, "--out", "run"]
    afresh = [] if moment == "listening" else None
    with data_withheld(), started(*args, cwd=tmp_path, under=afresh) as podium:
        pid = podium.process.pid
        podium.until(lambda: listening(pid) if moment == "listening" else len(waiting_for_data(pid)) == 2, moment)
        family = psutil.Process(pid).children(recursive=True)
        done = podium.ended(by=signal.SIGTERM)
    assert_nothing_is_left(done, tmp_path, signal.SIGTERM)
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_a_signal_as_soon_as_there_is_a_run_is_answered_after_an_update(tmp_path, straight):
    run = Run(tmp_path / "run")
    with started("train", *TINY["mnist"], LENGTH, *UNSAVED, "--out", "run", cwd=tmp_path) as podium:
        podium.until(run.recipe_file.exists, "a run folder")
        done = podium.ended(by=signal.SIGTERM)
    assert_resumable(done, run, "stopped by SIGTERM")
    assert podium_here("resume", run.path).returncode == 0
    assert run.summary()["weights_sha256"] == straight("mnist")


@pytest.mark.parametrize("more", [[], ["--instances", "2"]], ids=["alone", "2 instances"])
def test_a_signal_before_a_killed_run_goes_on_says_how_to_continue(tmp_path, more):
    run = Run(tmp_path / "run")
    args = ["train", *TINY["neuron"], *SIMULATED, "batch.replicas=2", "batch.micro=4", ENDLESS, "--out", "run"]
    with started(*args, cwd=tmp_path) as podium:
        podium.until_records(run.path)
        podium.ended(by=signal.SIGKILL)
    assert run.summary()["state"] == "running"
    before = run.summary()

    with data_withheld(), started("resume", "run", *more, cwd=tmp_path) as podium:
        podium.until(lambda: len(waiting_for_data(podium.process.pid)) == (2 if more else 1), "all wait for data")
        done = podium.ended(by=signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    line = sentence(done.stderr)
    assert "stopped by SIGTERM before the first update; `podium resume run` continues" in line
    after = run.summary()
    assert after == {**before, "state": "interrupted", "written": after["written"]}


def swallowed(stop: StopRequest) -> None:
    with suppress(Exception):
        signal.raise_signal(signal.SIGTERM)
    assert stop.reason == "SIGTERM"


def turned_into_another_error(stop: StopRequest) -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except Interrupted as error:
        raise ValueError("something went wrong") from error


def before_a_mistake_is_found(stop: StopRequest) -> None:
    swallowed(stop)
    raise UserError("a mistake")


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        (swallowed, Interrupted, STARTS_AGAIN),
        (turned_into_another_error, Interrupted, STARTS_AGAIN),
        (before_a_mistake_is_found, UserError, "a mistake"),
    ],
)
def test_a_signal_in_the_middle_of_a_library_still_stops(body, error, told):
    def started_with() -> None:
        with StopRequest() as stop:
            stop.answer_at_once()
            body(stop)
            stop.begin(Instances.alone())

    with pytest.raises(error, match=told):
        started_with()


def test_signals_while_libraries_are_loaded_wait_until_that_is_done():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped by SIGUSR1 before the first update"):
            stop.answer_at_once()


# --- after the last update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_report_is_drawn_lets_it_finish(number, tmp_path):
    run = Run(tmp_path / "run")
    with started("train", *TINY["mnist"], "log.report=true", "--out", "run", cwd=tmp_path) as podium:
        podium.until(lambda: run.summary().get("state") == "done", "the end of the training")
        done = podium.ended(by=number)
    assert done.returncode == 0, done.stderr
    assert f"{number.name}: the training is done and saved, the rest is being finished" in done.stderr
    assert run.summary()["state"] == "done"
    assert run.report_file.exists()


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
    assert reading.checkpoint_paths(run.checkpoints) == []


def test_a_folder_being_trained_in_refuses_a_second_process(tmp_path):
    with started("train", *TINY["mnist"], ENDLESS, *UNSAVED, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(tmp_path / "run")
        assert_user_error(podium_here("resume", tmp_path / "run"), "is being trained by another process")
        assert_user_error(podium_here("train", *TINY["mnist"], "--out", tmp_path / "run"), "already holds a run")
        podium.until_records(tmp_path / "run", 20)  # and the first one goes on
