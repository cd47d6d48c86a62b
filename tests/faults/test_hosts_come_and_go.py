"""Instances and hosts (two network namespaces) that are lost, come and leave while a training runs: nobody starts anew,
and the outcome is that of a run that nothing happened to."""

import os
import signal
from itertools import groupby

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, both, ended, on_host
from tests.support.outcomes import outcome
from tests.support.processes import assert_user_error, num_records, podium_here, started, until
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

LONG = [*recipe_of("mnist"), "train.length=1200up", "checkpoint.every=500up", "valid.every=500up"]


def records_of(run):
    return Run(run).records()


def counts(run, name="instances"):
    return [key for key, _ in groupby(int(record[f"topology/{name}"]) for record in Run(run).records())]


@pytest.mark.parametrize("killed_on", [0, 1])
def test_an_instance_lost_on_one_of_two_hosts_is_replaced_while_the_others_go_on(
    killed_on, hosts, tmp_path, outcome_alone
):
    names, _ = hosts
    run = tmp_path / "run"
    first, second = both(names, tmp_path, "train", *LONG, "--out", "run")
    first.until_records(run, 6)
    (first, second)[killed_on].instances[killed_on].kill()
    first.until(lambda: "1 instance trains from update" in first.stderr or killed_on == 0, "the one that is left")
    first.until(lambda: "2 instances train on 2 hosts from update" in first.stderr, "the one that has come")
    results = [ended(process) for process in (first, second)]
    assert [code for code, _ in results] == [0, 0], results
    assert "was killed by SIGKILL; the others go on without it (1 of 3)" in first.stderr
    assert all("restarting" not in errors for _, errors in results), results
    assert outcome(Run(run)) == outcome_alone(LONG)


def test_a_range_begins_with_what_the_cores_allow_and_instances_come_and_leave(tmp_path, outcome_alone):
    run = tmp_path / "run"
    with started("train", *LONG, "--instances", "1..3", "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(run, 3)
        began = len(launched.instances)
        assert began == min(3, len(os.sched_getaffinity(0)))
        joined = podium_here("join", run, "--instances", 3 - began)
        assert joined.returncode == 0, joined.stderr
        assert "3 instances train from update" in joined.stderr
        full = podium_here("join", run)
        assert_user_error(full, "the run has 3 instances, and takes 3 at most")
        left = podium_here("leave", run, "--instances", 2)
        assert left.returncode == 0, left.stderr
        assert "1 instance trains from update" in left.stderr
        assert_user_error(podium_here("leave", run, "--instances", 1), "needs one instance")
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert counts(run) == [began, 3, 1]
    assert outcome(Run(run)) == outcome_alone(LONG)
    assert not (run / "launch.json").exists()
    assert_user_error(podium_here("join", run), "does not say that it trains anywhere")
