"""Instances and hosts (two network namespaces) that are lost, come and leave while a training runs: nobody starts anew,
and the outcome is that of a run that nothing happened to."""

import os
import signal
from itertools import groupby

import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, SPREAD, both, ended, on_host
from tests.support.outcomes import outcome
from tests.support.processes import assert_user_error, num_records, podium_ended, podium_here, started
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
        if began < 3:
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
    assert counts(run) == [*({began} - {3}), 3, 1]
    assert outcome(Run(run)) == outcome_alone(LONG)
    assert not (run / "launch.json").exists()
    for command in ("join", "leave"):
        assert_user_error(podium_here(command, run), "is complete: no training is under way")


def test_another_host_comes_to_a_training_and_leaves_it(hosts, tmp_path, outcome_alone):
    names, _ = hosts
    run, recipe = tmp_path / "run", [*LONG, "launch.timeout=20"]
    first = on_host(
        names[0], tmp_path, "train", *recipe, "--hosts", HOSTS[0], "--instances", "1..4", "--join", "--out", "run"
    )
    first.until(lambda: (run / "launch.json").exists(), "the first update")
    first.until_records(run, 3)
    began = len(first.instances)
    stranger = on_host(names[1], tmp_path, "join", "run", "--host", HOSTS[1], env={"PODIUM_SECRET": "x" * 32})
    code, errors = ended(stranger)
    assert code == 2, errors
    assert "has another secret than this host" in errors
    second = on_host(names[1], tmp_path, "join", "run", "--host", HOSTS[1], "--instances", 1)
    sentence = f"{began + 1} instances train on 2 hosts from update"
    first.until(lambda: sentence in first.stderr, "the other host")
    first.until_records(run, num_records(Run(run)) + 3)
    left = on_host(names[0], tmp_path, "leave", "run", "--host", HOSTS[1])
    assert ended(left)[0] == 0, left.stderr
    code, errors = ended(second)
    assert code == 0, errors
    assert f"{HOSTS[1]} has left the run" in errors
    code, errors = ended(first)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "go on without" not in errors
    assert counts(run, "hosts") == [1, 2, 1]
    assert outcome(Run(run)) == outcome_alone(recipe)


def test_a_host_that_is_lost_is_taken_back_when_it_is_there_again(hosts, tmp_path, outcome_alone):
    names, _ = hosts
    run, recipe = tmp_path / "run", [*LONG, "train.length=2000up"]
    args = ["train", *recipe, "--out", "run"]
    first, second = both(names, tmp_path, *args)
    first.until_records(run, 6)
    second.kill_all()
    first.until(
        lambda: f"heard nothing from {HOSTS[1]}; the others go on without it (1 of 3)" in first.stderr, "a word"
    )
    first.until(lambda: "1 instance trains from update" in first.stderr, "the one that is left")
    again = on_host(names[1], tmp_path, *args, *SPREAD, "--join")
    first.until(lambda: "2 instances train on 2 hosts from update" in first.stderr, "the host that is back")
    results = [ended(process) for process in (first, again)]
    assert [code for code, _ in results] == [0, 0], results
    assert all("restarting" not in errors for _, errors in results), results
    assert counts(run, "hosts") == [2, 1, 2]
    assert outcome(Run(run)) == outcome_alone(recipe)


def test_with_fewer_than_asked_for_a_run_waits_for_others_then_saves_and_stops(hosts, tmp_path, weights_alone):
    names, _ = hosts
    run, recipe = tmp_path / "run", [*LONG, "launch.timeout=5"]
    spread = ["--hosts", f"{HOSTS[0]}:2,{HOSTS[1]}:1", "--instances", "3..4", "--join", "--out", "run"]
    first, second = (on_host(name, tmp_path, "train", *recipe, *spread) for name in names)
    first.until_records(run, 3)
    first.instances[1].kill()
    first.until(lambda: "3 instances train on 2 hosts from update" in first.stderr, "the one that has come")
    assert "2 instances train" not in first.stderr
    second.kill_all()
    code, errors = ended(first)
    assert code == 75, errors
    assert "only 2 instances are left, and at least 3 were asked for: nobody has come for 5 s" in errors
    assert "stopped by SIGTERM" in errors
    done = podium_ended(tmp_path, "resume", "run", "--instances", 3)
    assert done.returncode == 0, done.stderr
    assert Run(run).summary()["weights_sha256"] == weights_alone(recipe)


def test_where_each_has_a_share_as_many_leave_at_once_as_hold_copies_of_it(tmp_path, outcome_alone):
    run, recipe = tmp_path / "run", [*LONG, "train.length=2500up"]
    spare = ["parallel.shard=optimiser", "launch.spare_copies=1"]
    with started("train", *recipe, *spare, "--instances", "1..3", "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(run, 3)
        if (began := len(launched.instances)) < 3:
            joined = podium_here("join", run, "--instances", 3 - began)
            assert "3 instances train from update" in joined.stderr
        assert_user_error(podium_here("leave", run, "--instances", 2), "1 at most can leave at once")
        for left in ("2 instances train", "1 instance trains"):
            assert f"{left} from update" in podium_here("leave", run, "--instances", 1).stderr
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert "restarting" not in done.stderr
    assert outcome(Run(run)) == outcome_alone(recipe)


def test_an_instance_that_finds_a_mistake_as_it_comes_is_told_and_the_others_go_on(tmp_path):
    run, recipe = tmp_path / "run", tmp_path / "small.yaml"
    args = [text for text in LONG[1:] if not text.startswith("train.length")]
    recipe.write_text("workload: { name: mnist }\ntrain: { length: 100000up }\noptim: { name: sgd, lr: 1e-3 }\n")
    with started("train", recipe, *args, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(run, 3)
        recipe.write_text(recipe.read_text() + "seed: 5\n")
        assert_user_error(podium_here("join", run), "recipes differ")
        launched.until_records(run, num_records(Run(run)) + 3)
        done = launched.ended(signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    assert "cannot: recipes differ" in done.stderr
    assert counts(run) == [2]


def test_instances_that_cannot_come_and_go_stay_and_say_so(tmp_path):
    run, recipe = tmp_path / "run", [*LONG, "train.length=100000up", "engine.reduction=fast"]
    with started("train", *recipe, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(run, 3)
        for command in ("join", "leave"):
            assert_user_error(podium_here(command, run, "--instances", 1), "its instances cannot come and go")
        assert launched.ended(signal.SIGTERM).returncode == 75
    assert "restarting" not in launched.stderr
    assert counts(run) == [2]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--instances", "5..2"], "the range ends before it begins"),
        (["--instances", "2..x"], "expected a number, a range such as 2..8, or auto"),
        (["--instances", "5..8"], "no number in it can carry the recipe's replicas (possible: 1 to 4)"),
        (["--instances", "1..2", "parallel.shard=optimiser"], "does not go with parallel.shard=optimiser"),
        (["--instances", "1..2", "--hosts", "a:2,b:2"], "which names 4 instances"),
    ],
)
def test_ranges_that_cannot_be_are_refused(words, part, tmp_path):
    assert_user_error(podium_here("train", *LONG, *words, "--out", tmp_path / "run"), part)
    assert not (tmp_path / "run").exists()
