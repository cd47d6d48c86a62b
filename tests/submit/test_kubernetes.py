"""`podium submit kubernetes` and the commands about its jobs, against an API server on loopback and pods that run."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.recipe.loading import load_recipe, to_yaml
from podium.runs.folder import Run
from podium.submit.records import find_job
from tests.support.kube import Kube, running_kube
from tests.support.processes import assert_user_error, num_records, podium_here, until
from tests.support.recipes import recipe_of
from tests.support.sandbox import missing_commands

RECIPE = [*recipe_of("mnist"), "launch.timeout=60"]
SITE = """\
container: {{runtime: docker, image: "podium:1", podium: {python} -m podium}}
secrets: [WANDB_API_KEY]
kubernetes:
  requeues: 3
  grace: 60
  runs: {{path: /runs, folder: {folder}}}
"""


@pytest.fixture
def kube(hosts, tmp_path, monkeypatch) -> Iterator[Kube]:
    names, _ = hosts
    if missing := missing_commands():
        pytest.skip(f"pods cannot be sandboxed here (no {', '.join(missing)})")
    with running_kube(tmp_path, names) as running:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
        monkeypatch.setenv("WANDB_API_KEY", "not-to-be-seen-anywhere")
        (tmp_path / "runs").mkdir()
        (tmp_path / "site.yaml").write_text(SITE.format(python=sys.executable, folder=tmp_path / "runs"))
        yield running


def submitted(*words: str, name: str = "try") -> Run:
    done = podium_here("submit", "kubernetes", *RECIPE, "--site", "site.yaml", "--out", name, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name}\n"
    return Run(Path("runs") / name)


def codes(kube: Kube, job: str = "try") -> list[tuple[int, int | None]]:
    return [(one.index, one.code) for one in kube.attempts(job)]


def logs_of(kube: Kube) -> str:
    return "\n".join(waiting.log.decode() for _, waiting in kube.pods.values())


@pytest.mark.slow
def test_a_job_of_two_pods_that_is_evicted_and_loses_a_node_ends_at_the_weights_of_one_process(kube, weights_alone):
    run = submitted("--pods", "2")
    job = kube.jobs["try"]
    until(lambda: num_records(run) >= 4 or job.state != "running", "records")
    assert "running" in podium_here("status", "try").stdout
    with kube.lock:
        job.evict(1)
    until(lambda: len(kube.attempts("try")) == 4 or job.state != "running", "new pods")
    assert codes(kube)[:2] == [(0, 75), (1, 75)], logs_of(kube)
    records = num_records(run)
    until(lambda: num_records(run) >= records + 4 or job.state != "running", "records after the eviction")
    with kube.lock:
        job.lose_node(1)
    followed = podium_here("logs", "-f", "try")
    until(lambda: job.state != "running" and not job.active, "the end of the job")
    assert job.state == "done", logs_of(kube)
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert 2 in {int(record["topology/hosts"]) for record in run.records()}  # at the end the other pod may be missing
    assert "resuming" in followed.stdout
    shown = podium_here("status", "try")
    assert "done" in shown.stdout
    assert "evicted" in shown.stdout
    assert "not-to-be-seen" not in logs_of(kube) + shown.stdout + find_job("try").model_dump_json()


@pytest.mark.slow
def test_a_study_has_a_pod_for_each_run_and_a_failed_or_evicted_one_leaves_the_others_alone(kube):
    Path("mine.yaml").write_text(to_yaml(load_recipe(RECIPE[0], RECIPE[1:]).tree()))
    Path("study.yaml").write_text(
        "recipe: mine.yaml\nset: {train.length: 24up, launch.timeout: 60}\nvalues: {optim.lr: [0.1, 1.0e-3, 1.0e+30]}\n"
    )
    done = podium_here("submit", "kubernetes", "study", "study.yaml", "--site", "site.yaml", "--out", "sweep",
                       "--at-once", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    job, study = kube.jobs["sweep"], Path("runs/sweep")
    until(lambda: num_records(Run(study / "runs" / "0001")) >= 2 or job.state != "running", "records")
    with kube.lock:
        job.evict(1)
    until(lambda: job.state != "running" and not job.active, "the end of the job", 120)
    assert (job.reason, job.given_up) == ("FailedIndexes", {2}), logs_of(kube)
    assert [(index, code) for index, code in codes(kube, "sweep") if index != 1] == [(0, 0), (2, 3)]
    assert [code for index, code in codes(kube, "sweep") if index == 1] == [75, 0], logs_of(kube)
    shown = podium_here("status", "sweep")
    assert "2 of 3 runs done, 1 failed" in shown.stdout
    listed = podium_here("study", "status", str(study), "--json")
    assert listed.returncode == 0, listed.stderr
    runs = json.loads(listed.stdout)["runs"]
    assert [one["state"] for one in runs] == ["finished", "finished", "failed"]
    assert "valid/loss" in (study / "table.csv").read_text()


@pytest.mark.slow
def test_a_mistake_fails_the_job_at_once_and_is_told(kube):
    submitted("train.length=400up", "workload.data.source=files", "workload.data.path=/nowhere")
    until(lambda: kube.jobs["try"].state != "running" and not kube.jobs["try"].active, "the end of the job")
    assert codes(kube) == [(0, 2)], logs_of(kube)
    assert "/nowhere" in podium_here("logs", "try").stdout
    assert "PodFailurePolicy" in podium_here("status", "try").stdout


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_and_leaves_nothing_in_the_cluster_but_its_run(kube):
    run = submitted("train.length=4000up")
    until(lambda: num_records(run) >= 4 or kube.jobs["try"].state != "running", "records")
    assert {plural for plural, _ in kube.objects} == {"jobs", "configmaps", "secrets"}
    assert podium_here("cancel", "try").returncode == 0
    until(lambda: not kube.jobs["try"].active, "the end of the pods")
    assert codes(kube) == [(0, 75)], logs_of(kube)
    assert run.summary()["state"] == "interrupted"
    assert kube.objects == {}
    assert "no longer there" in podium_here("status", "try").stdout


def test_what_the_cluster_refuses_is_one_sentence_and_leaves_nothing_behind(kube):
    kube.create("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "try"}})
    done = podium_here("submit", "kubernetes", *RECIPE, "--site", "site.yaml", "--out", "try")
    assert_user_error(done, "the cluster refuses", 'configmaps "try" already exists')
    assert set(kube.objects) == {("configmaps", "try")}


def test_without_a_cluster_or_an_image_it_is_one_sentence(kube, monkeypatch):
    Path("plain.yaml").write_text("node: {cores: 2}\n")
    assert_user_error(podium_here("submit", "kubernetes", *RECIPE, "--site", "plain.yaml"), "container.image")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    done = podium_here("submit", "kubernetes", *RECIPE, "--site", "site.yaml")
    assert_user_error(done, "no cluster is configured")
    monkeypatch.delenv("WANDB_API_KEY")
    assert_user_error(
        podium_here("submit", "kubernetes", *RECIPE, "--site", "site.yaml"), "WANDB_API_KEY, which is not"
    )


def test_a_dry_run_prints_the_manifests_sends_nothing_and_has_no_secret(kube):
    done = podium_here("submit", "kubernetes", *RECIPE, "--site", "site.yaml", "--pods", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "kind: Job" in done.stdout
    assert "not-to-be-seen" not in done.stdout + done.stderr
    assert kube.requests == []
