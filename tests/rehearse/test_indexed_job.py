"""The stand-in for the controller of Jobs: indexes, the pod failure policy, evictions, limits."""

import pytest

from podium.recipe.loading import load_recipe
from podium.rehearse.indexed_job import IndexedJob
from podium.submit.kubernetes.job import Pods, plan_pods, plan_study
from podium.submit.kubernetes.manifests import manifests
from podium.submit.site import site_from_tree
from podium.submit.target import Wishes

RECIPE = load_recipe("mnist", ["batch.replicas=4"])
SITE = site_from_tree(
    {
        "container": {"runtime": "docker", "image": "podium:1"},
        "kubernetes": {"runs": {"path": "/runs", "claim": "runs"}, "requeues": 1, "grace": 1},
    }
)


class Scripted:
    """A pod that ends as the test says."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.asked = False

    def exit_code(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked = True

    def kill(self) -> None:
        self.code = 137


TWO = plan_pods("try", RECIPE, SITE, Wishes(nodes=(2, 2), per_node=1))


class Job(IndexedJob):
    """A Job of two pods, by the manifest that the target makes."""

    def __init__(self, pods: Pods = TWO) -> None:
        self.pods: dict[int, list[Scripted]] = {index: [] for index in range(pods.count)}
        super().__init__(manifests(pods, SITE, RECIPE.tree(), 1)[0]["spec"], self._start, backoff_s=0.0)
        self.step()

    def _start(self, index: int, number: int) -> Scripted:
        assert number == len(self.pods[index])
        self.pods[index].append(Scripted())
        return self.pods[index][-1]

    def end(self, *codes: int | None) -> None:
        for index, code in enumerate(codes):
            self.pods[index][-1].code = code
        self.step()

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.pods[0]), len(self.pods[1])


def test_a_job_is_done_once_every_index_is():
    job = Job()
    job.end(0, None)
    assert job.state == "running"
    job.end(0, 0)
    assert (job.state, job.counts) == ("done", (1, 1))


def test_a_failing_run_of_a_study_leaves_the_others_alone_and_only_so_many_run_at_once():
    job = Job(plan_study("try", RECIPE, SITE, Wishes(at_once=2), 3))
    assert [len(job.pods[index]) for index in range(3)] == [1, 1, 0]
    job.end(2)
    assert [len(job.pods[index]) for index in range(3)] == [1, 1, 1]
    for code in (75, 75):  # one requeue is allowed, another is not
        job.pods[1][-1].code = code
        job.step()
    assert (job.state, job.given_up, len(job.pods[1])) == ("running", {0, 1}, 2)
    job.pods[2][-1].code = 0
    job.step()
    assert (job.state, job.reason) == ("failed", "FailedIndexes")


def test_interrupted_pods_start_again_so_often_and_no_more():
    job = Job()
    job.end(75, 75)
    assert (job.state, job.failures, job.counts) == ("running", 2, (2, 2))
    job.end(75, None)
    assert (job.state, job.reason) == ("failed", "BackoffLimitExceeded")
    assert job.pods[1][-1].asked


@pytest.mark.parametrize("code", [1, 2, 3, 137, 143])
def test_any_other_end_fails_the_job_and_ends_its_other_pods(code):
    job = Job()
    job.end(None, code)
    job.step()
    assert (job.state, job.reason, job.counts) == ("failed", "PodFailurePolicy", (1, 1))
    assert job.pods[0][-1].asked


@pytest.mark.parametrize("code", [75, 137, 143])
def test_evictions_and_lost_nodes_are_not_counted_however_the_pod_ends(code):
    job = Job()
    for number in range(1, 6):
        job.evict(1)
        assert job.pods[1][-1].asked
        job.end(None, code)
        assert (job.state, job.failures, job.counts) == ("running", 0, (1, number + 1))
    job.lose_node(1)
    job.step()
    assert (job.state, job.failures, job.counts) == ("running", 0, (1, 7))
