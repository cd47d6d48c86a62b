"""Sites, studies, plans' tables, records of jobs and runs that anybody may have written: every command that reads them
gives one sentence or does its work, and never waits."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.machine.state_folder import state_folder
from podium.recipe.loading import read_yaml
from podium.submit.records import JobRecord, keep_job
from podium.submit.site import SHIPPED_SITES
from tests.support.hostile import NO_FILES, Tally, attack, changed_tree, damaged, no_hang, replace_by
from tests.support.made_runs import make_run
from tests.support.processes import podium_here, sentence
from tests.support.studies import PretendedRuns, conducted

pytestmark = pytest.mark.slow


def told(tally: Tally, *words: object) -> None:
    """Run a command: it does its work, or exits with 2 and one sentence."""
    tally.inputs += 1
    with no_hang():
        done = podium_here(*words)
    assert done.returncode in (0, 2), (words, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    if done.returncode == 2:
        tally.add(sentence(done.stderr))
    else:
        tally.right += 1


def as_yaml(tree: Any) -> bytes:
    """JSON is YAML, but for numbers that JSON does not have."""
    return json.dumps(tree).encode()


# ---------------------------------------------------------------------------------------------------------------- sites


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "ssh"])
def test_sites_with_any_content(tmp_path, target):
    tally, path = Tally(f"sites: {target}"), tmp_path / "site.yaml"
    texts = [file.read_bytes() for file in sorted(SHIPPED_SITES.glob("*.yaml"))]
    trees = [dict(read_yaml(file)) for file in sorted(SHIPPED_SITES.glob("*.yaml"))]

    @attack(25)
    @given(st.one_of(damaged(texts), st.sampled_from(trees).flatmap(changed_tree).map(as_yaml)))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        told(tally, "submit", target, "mnist", "--site", path, "--dry-run")

    try_one()
    tally.report()


@pytest.mark.parametrize("kind", NO_FILES)
def test_sites_studies_and_tables_that_are_no_files(tmp_path, kind):
    tally, path = Tally("no files"), tmp_path / "it.yaml"
    replace_by(path, kind)
    told(tally, "submit", "slurm", "mnist", "--site", path, "--dry-run")
    told(tally, "submit", "slurm", "study", path, "--site", "cpu_cluster", "--dry-run")
    told(tally, "study", "run", path, "--out", tmp_path / "study")
    told(tally, "plan", "--from", path)
    assert tally.right == 0
    assert not (tmp_path / "study").exists()


# -------------------------------------------------------------------------------------------------------------- studies

STUDY: dict[str, Any] = {
    "recipe": "neuron/quick",
    "method": "tpe",
    "values": {"optim.lr": {"from": 1e-4, "to": 1e-2, "log": True}, "batch.micro": [4, 8]},
    "set": {"train.length": "9ep"},
    "metric": "valid/loss",
    "seeds": 2,
    "generation": 4,
    "budget": {"runs": 8},
    "halving": {"first": "1ep", "factor": 3},
    "constraints": [{"metric": "updates", "at_most": 1000}],
}


def test_study_files_with_any_content(tmp_path):
    tally, path = Tally("study files"), tmp_path / "study.yaml"

    @attack(50)
    @given(st.one_of(damaged([as_yaml(STUDY)]), changed_tree(STUDY).map(as_yaml)))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        told(tally, "submit", "slurm", "study", path, "--site", "cpu_cluster", "--dry-run")

    try_one()
    tally.report()


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> Path:
    """A study that is complete."""
    path = tmp_path_factory.mktemp("study") / "study"
    conducted(path, PretendedRuns(1), values={"optim.lr": [1e-3, 2e-3], "batch.replicas": [1, 2]})
    return path


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def looked_at(tally: Tally, study: Path, out: Path) -> None:
    told(tally, "study", "status", study)
    told(tally, "study", "status", study, "--json")
    for name in ("study.csv", "study.json", "study.log"):
        told(tally, "study", "export", study, "--to", out / name)
        (out / name).unlink(missing_ok=True)
    told(tally, "report", study, "--out", out / "report.html")
    told(tally, "compare", study)
    told(tally, "runs", study)
    shutil.rmtree(out / "report.html", ignore_errors=True)


def test_study_folders_with_any_content(studied, tmp_path):
    tally, study = Tally("study folders"), tmp_path / "study"
    shutil.copytree(studied, study)
    names = [name for name in files_of(study) if name.suffix in (".json", ".jsonl", ".yaml", ".csv")]
    assert Path("runs.jsonl") in names
    originals = {name: (study / name).read_bytes() for name in names}

    @attack(15)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        original = originals[name]
        if name.suffix == ".json" and data.draw(st.booleans()):
            content = json.dumps(data.draw(changed_tree(json.loads(original)))).encode()
        elif name.suffix == ".jsonl" and data.draw(st.booleans()):
            lines = original.splitlines()
            at = data.draw(st.integers(0, len(lines) - 1))
            lines[at] = json.dumps(data.draw(changed_tree(json.loads(lines[at])))).encode()
            content = b"\n".join(lines) + b"\n"
        else:
            content = data.draw(damaged([original]))
        (study / name).write_bytes(content)
        try:
            looked_at(tally, study, tmp_path)
        finally:
            (study / name).write_bytes(original)

    try_one()
    tally.report()


@pytest.mark.parametrize("kind", NO_FILES)
def test_study_folders_with_no_files_in_them(studied, tmp_path, kind):
    tally = Tally("study folders, no files")
    for number, name in enumerate(["study.yaml", "base.yaml", "study.json", "runs.jsonl", "table.csv", ".lock"]):
        study = tmp_path / f"study-{number}"
        shutil.copytree(studied, study)
        replace_by(study / name, kind)
        looked_at(tally, study, tmp_path)
        shutil.rmtree(study)


# --------------------------------------------------------------------------------------------------- tables for plans


def test_tables_of_times_with_any_content(tmp_path):
    tally, path = Tally("tables for plans"), tmp_path / "times.csv"
    texts = [
        b"devices,seconds_per_epoch\n1,22.2\n2,15.38\n4,9.1\n8,6.2\n",
        b"devices,samples_per_second\n1,350\n2,690\n4,1300\n8,2400\n",
    ]

    @attack(60)
    @given(damaged(texts))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        told(tally, "plan", "--from", path)

    try_one()
    tally.report()


# ----------------------------------------------------------------------------------------------------------------- jobs

JOB = JobRecord(
    name="mnist-001",
    target="slurm",
    kind="run",
    id="123",
    folder="podium/runs/mnist-001",
    site={"slurm": {"partition": "cpu", "time": "4h"}},
    submitted="2026-11-18T12:00:00+00:00",
    words=["mnist"],
)


@pytest.fixture
def own_state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm, no ssh
    keep_job(JOB)
    return state_folder("jobs", "mnist-001.json")


def test_records_of_jobs_with_any_content(own_state):
    tally, original = Tally("records of jobs"), own_state.read_bytes()
    trees = [json.loads(original) | {"target": target} for target in ("slurm", "ssh", "kubernetes")]

    @attack(40)
    @given(st.one_of(damaged([original]), st.sampled_from(trees).flatmap(changed_tree).map(as_yaml)))
    def try_one(content: bytes) -> None:
        own_state.write_bytes(content)
        for words in (["jobs"], ["status", "mnist-001"], ["logs", "mnist-001"], ["cancel", "mnist-001"]):
            told(tally, *words)

    try_one()
    tally.report()


@pytest.mark.parametrize("kind", NO_FILES)
def test_records_of_jobs_that_are_no_files(own_state, kind):
    tally = Tally("records of jobs, no files")
    replace_by(own_state, kind)
    for words in (["jobs"], ["status", "mnist-001"], ["logs", "mnist-001"], ["cancel", "mnist-001"]):
        told(tally, *words)


KUBECONFIGS = [
    b"",
    b"clusters: 3\ncontexts: [a]\ncurrent-context: {}\n",
    b"\0\xff: [",
    b"apiVersion: v1\ncontexts:\n- {name: a, context: {cluster: b}}\ncurrent-context: a\nclusters: []\nusers: []\n",
    b"a" * 10_000,
    None,
]


@pytest.mark.parametrize("content", KUBECONFIGS)
def test_configurations_of_kubectl_with_any_content(tmp_path, monkeypatch, content):
    pytest.importorskip("kubernetes", reason="needs Kubernetes' client")
    tally, path = Tally("kubeconfig"), tmp_path / "config"
    path.mkdir() if content is None else path.write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    told(tally, "submit", "kubernetes", "mnist", "--site", "pod")
    assert tally.right == 0


# ----------------------------------------------------------------------------------------------------------------- runs


def test_reports_of_runs_with_any_content(tmp_path):
    tally = Tally("reports")
    runs = [make_run(tmp_path / "runs" / name, picture="a", energy_j=100.0) for name in ("a", "b")]
    run = runs[0]
    names = files_of(run)
    originals = {name: (run / name).read_bytes() for name in names}
    commands: Sequence[Callable[[], Sequence[object]]] = (
        lambda: ("report", *runs, "--out", tmp_path / "report.html"),
        lambda: ("report", run, "--out", tmp_path / "report.html"),
        lambda: ("compare", *runs),
        lambda: ("runs", tmp_path / "runs"),
        lambda: ("monitor", run),
    )

    @attack(20)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        original = originals[name]
        if name.suffix == ".json" and data.draw(st.booleans()):
            content = json.dumps(data.draw(changed_tree(json.loads(original)))).encode()
        else:
            content = data.draw(damaged([original]))
        (run / name).write_bytes(content)
        try:
            for command in commands:
                told(tally, *command())
        finally:
            (run / name).write_bytes(original)

    try_one()
    tally.report()
    assert os.path.lexists(run / "summary.json")
