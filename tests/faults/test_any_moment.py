"""Instances that end or fall silent while the others go on: no checkpoint is read, no update is lost, and records,
weights and optimiser state are those of a run that nothing happened to. `make soak` does the same with many more."""

import random
import signal
import time
from itertools import groupby

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.outcomes import outcome
from tests.support.processes import num_records, sentence, started
from tests.support.recipes import MORE, NUM_KILLS_EACH, recipe_of

pytestmark = pytest.mark.slow

#: long enough for one that is lost to be replaced before the end
LONG = [*recipe_of("mnist"), "train.length=1200up", "checkpoint.every=500up", "valid.every=500up"]


@pytest.mark.parametrize("workload", sorted(MORE))
def test_kills_of_one_instance_after_another_leave_no_trace(workload, tmp_path, outcome_alone):
    draw, run = random.Random(workload), tmp_path / "run"
    args = [*recipe_of(workload), "launch.restarts=1000", "log.monitor=false"]
    with started("train", *args, "--instances", 3, "--out", "run", cwd=tmp_path) as launched:
        for kills in range(1, NUM_KILLS_EACH + 1):
            launched.until_records(run, num_records(Run(run)) + draw.randint(1, 4))
            seats = sorted(launched.instances)
            killed = seats[0] if kills == 1 else draw.choice(seats)  # the first time the one that leads
            launched.instances[killed].kill()
            launched.until(lambda n=kills: launched.stderr.count("was killed by SIGKILL") == n, "the notice")
            launched.until(lambda: launched.stderr.count("from update"), "those that are left")
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "restarting" not in done.stderr, done.stderr
    assert outcome(Run(run)) == outcome_alone(recipe_of(workload))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_instance_is_replaced_while_the_other_goes_on(killed, tmp_path, outcome_alone):
    with started("train", *LONG, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 6)
        other = launched.instances[1 - killed]
        launched.instances[killed].kill()
        launched.until(lambda: "1 instance trains from update" in launched.stderr, "the one that is left")
        launched.until(lambda: "2 instances train from update" in launched.stderr, "the one that has come")
        assert other.is_running()
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert f"instance {killed} on " in done.stderr
    assert "was killed by SIGKILL; the others go on without it (1 of 3)" in done.stderr
    assert "SIGTERM" not in done.stderr
    records = Run(tmp_path / "run").records()
    counts = [int(record["topology/instances"]) for record in records]
    assert [key for key, _ in groupby(counts)] == [2, 1, 2]
    assert outcome(Run(tmp_path / "run")) == outcome_alone(LONG)


def test_an_instance_that_was_only_slow_ends_itself_with_one_sentence(tmp_path, outcome_alone):
    args = [*LONG, "launch.timeout=4", "launch.restarts=1", "--instances", 2, "--out", "run"]  # it counts once
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        slow = launched.instances[1]
        slow.send_signal(signal.SIGSTOP)
        launched.until(lambda: "heard nothing from instance 1 on " in launched.stderr, "the silent instance's name")
        launched.until(lambda: "1 instance trains from update" in launched.stderr, "the one that is left")
        slow.send_signal(signal.SIGCONT)
        psutil.wait_procs([slow], timeout=60)
        launched.until(lambda: "was silent, and the others go on without it: it has ended" in launched.stderr, "a word")
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it has ended") == 1
    assert outcome(Run(tmp_path / "run")) == outcome_alone(LONG)


def test_instances_that_stay_stopped_do_not_keep_a_run_from_ending(tmp_path, weights_alone):
    recipe = recipe_of("mnist")
    args = [*recipe, "launch.timeout=4", "--instances", 2, "--out", "run"]
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        stopped = list(launched.instances.values())
        stopped[1].send_signal(signal.SIGSTOP)
        launched.until(lambda: "heard nothing from instance 1 on " in launched.stderr, "the silent instance's name")
        began = time.monotonic()
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert not psutil.pid_exists(stopped[1].pid)
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(recipe)


def test_a_lost_lead_that_is_stopped_is_ended_so_that_it_writes_no_more(tmp_path, outcome_alone):
    recipe = recipe_of("mnist")
    args = [*recipe, "launch.timeout=4", "--instances", 2, "--out", "run"]
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        lead = launched.instances[0]
        lead.send_signal(signal.SIGSTOP)
        launched.until(lambda: "heard nothing from instance 0 on " in launched.stderr, "the silent instance's name")
        launched.until(lambda: "1 instance trains from update" in launched.stderr, "the one that is left")
        assert not psutil.pid_exists(lead.pid)
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(recipe)


def test_a_signal_while_an_instance_is_missing_saves_and_the_run_goes_on_later(tmp_path, weights_alone):
    with started("train", *LONG, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 3)
        launched.instances[0].kill()
        launched.until(lambda: "1 instance trains from update" in launched.stderr, "the one that is left")
        done = launched.ended(signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    assert "stopped by SIGTERM" in sentence(done.stderr)
    with started("resume", "run", "--instances", 2, cwd=tmp_path) as launched:
        assert launched.ended().returncode == 0, launched.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(LONG)


def test_instances_that_hold_a_part_of_the_state_each_restart_from_the_last_checkpoint(tmp_path, weights_alone):
    recipe = recipe_of("mnist")
    args = [*recipe, "parallel.shard=optimiser", "--instances", 2, "--out", "run"]
    with started("train", *args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 6)
        launched.instances[1].kill()
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; restarting from the last checkpoint (1 of 3)" in done.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(recipe)


def test_an_end_that_is_final_on_one_instance_ends_the_run_at_once(tmp_path, monkeypatch):
    """Instance 1 finds a loss that is not finite, which instance 0 does not see."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import podium.engine.update as u\n"
        "    from podium.errors import TrainingFailed\n"
        "    def fail(self): raise TrainingFailed('not finite')\n"
        "    u.Engine.collect = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    began = time.monotonic()
    args = [*recipe_of("mnist"), "--instances", 2, "--out", "run"]
    with started("train", *args, cwd=tmp_path, under=[]) as launched:
        done = launched.ended()
    assert done.returncode == 3, done.stderr
    assert "not finite" in sentence(done.stderr)
    assert "go on without" not in done.stderr
    assert time.monotonic() - began < 100  # not the 300 s that a silent instance has


def test_an_instance_lost_before_its_first_update_is_replaced(tmp_path, monkeypatch, outcome_alone):
    """At the beginning, and again where the training goes on from a checkpoint."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if os.environ.get('RANK') == '0':\n"
        "    import podium.training.regrouping as r\n"
        "    begin = r.Regrouping.begin\n"
        "    def lost(self, engine):\n"
        "        begin(self, engine)\n"
        "        time.sleep(1)  # until the other has begun, too\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    r.Regrouping.begin = lost\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for words, code in ((["train", *LONG, "--out"], 75), (["resume"], 0)):
        with started(*words, "run", "--instances", 2, cwd=tmp_path, under=[]) as launched:
            if code:
                launched.until(lambda: "2 instances train from update" in launched.stderr, "the one that has come")
                launched.until_records(tmp_path / "run", num_records(Run(tmp_path / "run")) + 2)
            done = launched.ended(signal.SIGTERM if code else None)
        assert done.returncode == code, done.stderr
        assert "was killed by SIGKILL; the others go on without it (1 of 3)" in done.stderr
        assert "restarting" not in done.stderr, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(LONG)
