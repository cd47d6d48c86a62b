"""What follows an attempt of a job: pure, from the record of the attempts before."""

import pytest

from podium.errors import UserError
from podium.submit.attempts import (
    Attempt,
    JobFacts,
    JobFolder,
    choose_instances,
    excluded_nodes,
    expand_nodes,
    judge,
    lost_nodes,
)
from podium.topology import possible_instances
from tests.support.processes import podium_here

FACTS = JobFacts(num_replicas=8, num_stages=1, per_node=4, requeues=3)
NODES = ["a", "b"]


def attempt(code: int, updates: int = 0, lost: list[str] | None = None) -> Attempt:
    return Attempt(began=0.0, nodes=NODES, instances=8, ended=1.0, code=code, updates=updates, lost=lost or [])


@pytest.mark.parametrize("code", [0, 2, 3])
def test_final_exit_codes_are_never_followed_by_another_attempt(code):
    verdict = judge(FACTS, [attempt(75, 5), attempt(code, 9)], NODES)
    assert (verdict.action, verdict.code) == ("end", code)


def test_saved_goes_back_into_the_queue_only_while_there_is_progress_and_at_most_so_often():
    assert judge(FACTS, [attempt(75, 0)], NODES).action == "requeue"
    assert judge(FACTS, [attempt(75, 5), attempt(75, 6)], NODES).action == "requeue"
    stuck = judge(FACTS, [attempt(75, 5), attempt(75, 5)], NODES)
    assert (stuck.action, stuck.code) == ("end", 3)
    assert "no progress since the attempt before (update 5 is all that was reached)" in stuck.reason
    often = judge(FACTS, [attempt(75, update) for update in (1, 2, 3, 4)], NODES)
    assert (often.action, often.code) == ("end", 75)
    assert "it has started 4 times" in often.reason


def test_a_node_that_lost_instances_twice_is_excluded_and_named():
    once = [attempt(137, 4, ["b"])]
    assert judge(FACTS, once, NODES).action == "again"
    twice = judge(FACTS, [*once, attempt(137, 4, ["b"])], NODES)
    assert (twice.action, twice.excluded) == ("again", ("b",))
    assert "b has lost instances twice and is excluded from now on" in twice.reason
    alone = judge(FACTS, [*once, attempt(137, 4, ["b"])], ["b"])
    assert (alone.action, alone.excluded) == ("requeue", ("b",))
    assert judge(FACTS, [*once, attempt(137, 4, ["a"])], NODES).action == "end"  # no progress, and nothing to change
    assert excluded_nodes([attempt(1, 0, ["a", "a"])]) == ()


def test_the_largest_count_that_can_carry_the_recipe_is_taken_on_whatever_nodes_there_are():
    for replicas in (1, 6, 8, 12):
        for stages in (1, 2):
            facts = JobFacts(num_replicas=replicas, num_stages=stages, per_node=4, requeues=0)
            for nodes in range(1, 6):
                used, count = choose_instances(facts, nodes)
                assert used <= nodes
                assert count in possible_instances(replicas, stages, used)
                assert count <= 4 * used
                assert count >= max(
                    (number for number in possible_instances(replicas, stages, 1) if number <= 4), default=0
                )
    assert choose_instances(JobFacts(num_replicas=7, num_stages=1, per_node=4, requeues=0), 3) == (2, 7)
    spans = JobFacts(num_replicas=8, num_stages=1, span=4, per_node=1, requeues=0)
    assert [choose_instances(spans, nodes) for nodes in (1, 2, 3, 4)] == [(1, 1), (2, 2), (2, 2), (4, 4)]
    alike = JobFacts(num_replicas=8, num_stages=1, alike=True, per_node=3, requeues=0)
    assert [choose_instances(alike, nodes) for nodes in (1, 2, 3)] == [(1, 2), (2, 4), (3, 8)]
    with pytest.raises(UserError, match="ask for more"):
        choose_instances(JobFacts(num_replicas=1, num_stages=8, per_node=2, requeues=0), 3)


def test_lost_instances_are_found_in_what_srun_prints():
    log = (
        "podium: instance 3 on gpu7: lost another instance\n"
        "srun: error: gpu2: task 1: Killed\n"
        "srun: error: gpu[003-004,9]: tasks 4-6: Segmentation fault (core dumped)\n"
        "srun: error: gpu1: tasks 0,2: Exited with exit code 75\n"
        "srun: error: Node failure on c-5\n"
    )
    assert lost_nodes(log) == ["c-5", "gpu003", "gpu004", "gpu2", "gpu9"]
    assert expand_nodes("a[1-2]-x,login") == ["a1-x", "a2-x", "login"]
    assert len(expand_nodes("a[0-99999999999]")) == 1


def test_the_record_of_attempts_survives_a_line_that_was_half_written(tmp_path):
    (tmp_path / "job.json").write_text(FACTS.model_dump_json())
    job = JobFolder(tmp_path / "0003")
    assert job.begin(["a"]) == (4, ["a"])
    with job.attempts_file.open("ab") as file:
        file.write(b'{"ended": 1.0, "co')
    assert job.attempts()[0].code is None
    with job.attempts_file.open("ab") as file:
        file.write(b"\n")
    assert job.begin(["a", "b"]) == (8, ["a", "b"])
    (job.path / "log").write_text("srun: error: b: task 7: Killed\n")
    assert job.end(137, 10, ["a", "b"]).action == "again"
    assert job.attempts()[1].lost == ["b"]
    (tmp_path / "cancelled").touch()
    assert job.begin(["a", "b"])[0] == 8
    assert job.end(75, 20, ["a", "b"]).action == "end"


def test_attempts_whose_end_nobody_recorded_are_counted_and_need_progress_too(tmp_path):
    (tmp_path / "job.json").write_text(FACTS.model_dump_json())
    job = JobFolder(tmp_path)
    assert job.settle(0) is None
    for updates in (4, 8, 12):  # the node of the script goes down, and the scheduler starts the job again by itself
        job.begin(NODES)
        assert job.settle(updates).action != "end"
        assert job.settle(updates) is None
    job.begin(NODES)
    last = job.settle(16)
    assert (last.action, last.code) == ("end", 3)
    assert (
        last.reason == "nobody was left to say how the attempt on a, b has ended; it has started 4 times, which is "
        "the most that is allowed"
    )
    assert [one.updates for one in job.attempts()] == [4, 8, 12, 16]


def test_a_job_that_goes_down_twice_without_progress_does_not_start_again(tmp_path):
    job, run = tmp_path / "job", tmp_path / "run"
    job.mkdir()
    (job / "job.json").write_text(FACTS.model_dump_json())
    (run / "checkpoints" / "update-00000004").mkdir(parents=True)
    (run / "recipe.yaml").touch()
    begin = ("attempt", "begin", job, run, "--nodes", "a b")
    for _ in range(2):
        assert podium_here(*begin).stdout.startswith("resume\n")
    ended = podium_here(*begin)
    assert ended.stdout == ""
    assert "no progress since the attempt before (update 4 is all that was reached): this job ends" in ended.stderr
    assert len(JobFolder(job).attempts()) == 2
