"""Whole runs that are killed, launchers that end, restarts that come to an end: to the same weights when told to go on.
`make soak` does the same with many more kills. Instances that end while others go on: `test_any_moment.py`."""

import os
import random
import signal
import time
from collections import defaultdict
from contextlib import suppress

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.processes import num_records, sentence, started, until
from tests.support.recipes import MORE, NUM_KILLS, NUM_KILLS_EACH, recipe_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workload", sorted(MORE))
def test_kills_of_the_whole_run_and_resumes_on_other_counts_end_at_the_same_weights(workload, tmp_path, weights_alone):
    draw = random.Random(workload)
    run, kills = Run(tmp_path / "run"), 0
    deadline = time.monotonic() + 120 + 60 * NUM_KILLS
    while run.summary().get("state") != "done":
        assert time.monotonic() < deadline
        command = ["resume", "run"] if run.recipe_file.exists() else ["train", *recipe_of(workload), "--out", "run"]
        with started(*command, "--instances", draw.choice([1, 2, 3, 4]), cwd=tmp_path) as launched:
            if kills == NUM_KILLS_EACH:
                assert launched.ended().returncode == 0, launched.stderr
                continue
            aim = num_records(run) + draw.randint(1, 4)
            until(lambda aim=aim: launched.process.poll() is not None or num_records(run) >= aim, "records")
            if launched.process.poll() is None:
                launched.kill_all()
                kills += 1
    assert kills == NUM_KILLS_EACH
    assert run.summary()["weights_sha256"] == weights_alone(recipe_of(workload))


def until_turned(launched) -> None:
    """Until both instances have had both cores."""
    seen = defaultdict(set)

    def turned() -> bool:
        found = launched.instances.values()
        with suppress(ProcessLookupError):
            for pid in [process.pid for process in found]:
                cores = os.sched_getaffinity(pid)
                seen[pid] |= cores if len(cores) == 1 else set()
        return [len(seen[process.pid]) for process in found] == [2, 2]

    launched.until(turned, "a turn")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_instances_change_cores_by_turns_also_after_one_was_replaced(tmp_path, weights_alone):
    recipe = [*recipe_of("mnist"), "train.length=1200up", "checkpoint.every=500up", "valid.every=500up"]
    with started("train", *recipe, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 6)
        until_turned(launched)
        launched.instances[1].kill()
        launched.until(lambda: "2 instances train from update" in launched.stderr, "the one that has come")
        until_turned(launched)
        assert launched.ended().returncode == 0
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(recipe)


def test_instances_keep_their_cores_where_asked(tmp_path):
    args = ["train", *recipe_of("mnist"), "launch.turns=false", "--instances", 2, "--out", "run"]
    with started(*args, cwd=tmp_path) as launched:
        seen = set()
        for num_records in range(1, 12):
            launched.until_records(tmp_path / "run", num_records)
            seen.add(tuple(tuple(os.sched_getaffinity(launched.instances[index].pid)) for index in range(2)))
    assert len(seen) == 1


def test_restarts_come_to_an_end(tmp_path):
    args = ["train", *recipe_of("mnist"), "launch.restarts=0", "--instances", 2, "--out", "run"]
    with started(*args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        launched.instances[1].kill()
        done = launched.ended()
    assert done.returncode == 3
    line = sentence(done.stderr)
    assert "instance 1 on " in line
    assert "was killed by SIGKILL" in line


def listening(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_a_signal_to_the_launcher_saves_once_and_ends_75(tmp_path):
    with started("train", *recipe_of("neuron"), "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        launcher = psutil.Process(launched.process.pid)
        addresses = set.union(*map(listening, [launcher, *launched.instances.values()]))
        assert addresses == set()  # on one host nobody is listened to
        done = launched.ended(signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    line = sentence(done.stderr)
    assert "stopped by SIGTERM" in line
    assert Run(tmp_path / "run").summary()["state"] == "interrupted"


def test_instances_of_a_killed_launcher_save_and_end(tmp_path):
    with started("train", *recipe_of("neuron"), "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        orphans = list(launched.instances.values())
        launched.ended(signal.SIGKILL)
        _, alive = psutil.wait_procs(orphans, timeout=60)
    assert not alive
    assert Run(tmp_path / "run").summary()["state"] == "interrupted"


def test_instances_of_a_launcher_that_is_killed_while_they_load_end_at_once_and_the_next_start_cleans_up(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = tmp_path / f"podium-{os.getuid()}"
    args = ["train", *recipe_of("mnist"), "--instances", 2]
    with started(*args, "--out", "run", cwd=tmp_path, under=[]) as launched:
        launched.until(lambda: len(psutil.Process(launched.process.pid).children()) == 2, "two processes")
        orphans = psutil.Process(launched.process.pid).children()  # they have not loaded anything yet
        launched.ended(signal.SIGKILL)
        _, alive = psutil.wait_procs(orphans, timeout=60)
        for one in alive:
            one.kill()
    assert not alive
    assert not (tmp_path / "run").exists()
    (left,) = place.iterdir()
    with started(*args, "--out", "next", cwd=tmp_path, under=[]) as launched:
        assert launched.ended().returncode == 0, launched.stderr
    assert not left.exists()
    assert list(place.iterdir()) == []


def test_an_unexpected_error_is_told_once_with_its_traceback_in_the_log(tmp_path):
    """Instance 1 finds its training data changed under its feet: an error of its own, that no other instance has."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import podium.engine.update as u\n"
        "    u.Engine.collect = lambda self: 1 / 0\n"
    )
    os.environ["PYTHONPATH"] = str(site)
    try:
        args = ["train", *recipe_of("mnist"), "launch.restarts=0", "--instances", 2, "--out", "run"]
        with started(*args, cwd=tmp_path, under=[]) as launched:
            done = launched.ended()
    finally:
        del os.environ["PYTHONPATH"]
    assert done.returncode == 3
    line = sentence(done.stderr)
    assert "instance 1 on " in line
    assert "ZeroDivisionError" in line
    log = (tmp_path / "run" / "log" / "instance-1.log").read_text()
    assert "Traceback" in log
    assert "ZeroDivisionError" in log
    assert "Traceback" not in done.stderr
