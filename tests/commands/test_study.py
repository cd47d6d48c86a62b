"""`podium study` with real trainings: equal tables, kills, growth, and what other programs read."""

import csv
import json
import signal

import pytest

from podium.runs.folder import Run
from podium.study.definition import check_values, study_from_tree
from podium.study.folder import StudyFolder
from podium.study.records import RecordLog, RunRecord
from tests.support.processes import assert_user_error, podium_ended, podium_here, run_files, started
from tests.support.recipes import TINY

_OWN = ["workload.data.samples=64", "schedule.name=constant", "valid.every=1ep"]
#: a study takes each key once
_BARE = [*(word for word in TINY["neuron"] if not word.startswith(("workload.data.samples", "train.length"))), *_OWN]
RECIPE = [*_BARE, "train.length=2ep"]
GRID = [*RECIPE, "optim.lr=1e-3,2e-3", "batch.replicas=1,2"]
LONG = [*_BARE, "optim.lr=1e-3,2e-3", "train.length=40ep", "checkpoint.every=2ep"]


def rows(folder):
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    done = podium_ended(folder, "study", *GRID, "--out", "grid", "--at-once", 1)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_three_at_once_give_the_table_and_the_weights_of_one_after_another(folder):
    done = podium_ended(folder, "study", *GRID, "--out", "three", "--at-once", 3)
    assert done.returncode == 0, done.stderr
    assert (folder / "three" / "table.csv").read_bytes() == (folder / "grid" / "table.csv").read_bytes()
    found = rows(folder / "three")
    assert len({row["weights_sha256"] for row in found}) == len(found) == 4
    assert "(best)" in done.stdout


@pytest.mark.slow
def test_tpe_with_halving_is_the_same_with_one_and_three_at_once(folder):
    (folder / "tpe.yaml").write_text(
        json.dumps(
            {
                "recipe": "neuron",
                "method": "tpe",
                "values": {"optim.lr": {"from": 1e-4, "to": 1e-2, "log": True}},
                "budget": {"runs": 6},
                "generation": 3,
                "startup": 3,
                "halving": {"first": "1ep", "factor": 3},
            }
        )
    )
    for at_once in (1, 3):
        done = podium_ended(folder, "study", "tpe.yaml", *RECIPE[1:], "--out", f"tpe-{at_once}", "--at-once", at_once)
        assert done.returncode == 0, done.stderr
    assert (folder / "tpe-1" / "table.csv").read_bytes() == (folder / "tpe-3" / "table.csv").read_bytes()
    assert [row["state"] for row in rows(folder / "tpe-1")].count("pruned") == 4


@pytest.mark.slow
def test_a_run_of_a_study_is_that_of_its_recipe_alone(folder):
    alone = podium_ended(folder, "train", "grid/recipes/0003.yaml", "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    assert Run(folder / "alone").summary()["weights_sha256"] == rows(folder / "grid")[3]["weights_sha256"]


@pytest.mark.slow
def test_a_study_goes_on_after_ctrl_c_and_after_a_kill_of_everything_with_the_same_table(tmp_path):
    done = podium_ended(tmp_path, "study", *LONG, "--out", "whole", "--at-once", 2)
    assert done.returncode == 0, done.stderr
    words = ("study", *LONG, "--out", "study", "--at-once", 2)
    with started(*words, cwd=tmp_path) as process:
        process.until_records(tmp_path / "study" / "runs" / "0000", 1)
        stopped = process.ended(by=signal.SIGINT)
    assert stopped.returncode == 75, stopped.stderr
    assert "`podium study study` continues" in stopped.stderr
    before = (tmp_path / "study" / "runs" / "0000" / "metrics.jsonl").read_bytes().count(b"\n")
    with started(*words, cwd=tmp_path) as process:
        process.until_records(tmp_path / "study" / "runs" / "0000", before + 1)
        process.kill_all()
    assert {record.state for record in StudyFolder(tmp_path / "study").records().values()} <= {"stopped", "finished"}
    done = podium_ended(tmp_path, "study", "study")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "study" / "table.csv").read_bytes() == (tmp_path / "whole" / "table.csv").read_bytes()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_runs_that_do_not_answer(folder):
    with started("study", *LONG, "--out", "impatient", "--at-once", 1, cwd=folder) as process:
        process.until_records(folder / "impatient" / "runs" / "0000", 1)
        process.instances[0].suspend()
        process.process.send_signal(signal.SIGINT)
        process.until(lambda: "once more" in process.stderr, "the study has heard of it")
        stopped = process.ended(by=signal.SIGINT)
    assert stopped.returncode == 75, stopped.stderr
    record = StudyFolder(folder / "impatient").records()[0]
    assert (record.state, record.reason, record.crashes) == ("stopped", "SIGINT", [])


@pytest.mark.slow
def test_a_killed_run_is_tried_again_and_ends_as_if_nothing_had_happened(folder):
    with started("study", *LONG, "--out", "killed", "--at-once", 1, cwd=folder) as process:
        process.until_records(folder / "killed" / "runs" / "0000", 1)
        process.instances[0].kill()
        done = process.ended()
    assert done.returncode == 0, done.stderr
    assert "run 0 has crashed (killed by SIGKILL) and is tried again" in done.stderr
    records = StudyFolder(folder / "killed").records()
    assert (records[0].state, records[0].attempts, records[0].crashes) == ("finished", 2, ["killed by SIGKILL"])
    shown = podium_here("study", "status", folder / "killed")
    assert "run 0 has crashed: killed by SIGKILL" in shown.stdout


@pytest.mark.slow
def test_grown_runs_have_the_weights_of_runs_that_were_long_from_the_start(folder):
    words = [*_BARE, "optim.lr=1e-3,2e-3"]
    for name, length in (("grown", "1ep"), ("grown", "3ep"), ("long", "3ep")):
        done = podium_ended(folder, "study", *words, f"train.length={length}", "--out", name, "--at-once", 2)
        assert done.returncode == 0, done.stderr
    assert (folder / "grown" / "table.csv").read_bytes() == (folder / "long" / "table.csv").read_bytes()
    assert "continues" in (folder / "grown" / "log" / "0000.log").read_text()


@pytest.mark.slow
def test_optuna_reads_an_export(folder):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    done = podium_here("study", "export", folder / "grid", "--to", folder / "grid.log")
    assert done.returncode == 0, done.stderr
    storage = JournalStorage(JournalFileBackend(str(folder / "grid.log")))
    study = optuna.load_study(study_name="grid", storage=storage)
    best = min(rows(folder / "grid"), key=lambda row: float(row["value"]))
    assert study.best_value == float(best["value"])
    assert study.best_params == {"optim.lr": float(best["optim.lr"]), "batch.replicas": int(best["batch.replicas"])}
    assert_user_error(podium_here("study", "export", folder / "grid", "--to", folder / "grid.log"), "already exists")


@pytest.mark.slow
def test_status_and_refusals_of_a_finished_study(folder):
    shown = podium_here("study", "status", folder / "grid")
    assert "the best of its column" in shown.stdout
    assert "nobody works on it now" in shown.stdout
    tree = json.loads(podium_here("study", "status", folder / "grid", "--json").stdout)
    assert [run["state"] for run in tree["runs"]] == ["finished"] * 4
    before = run_files(folder / "grid")
    refused = podium_here("study", *GRID, "batch.accumulation=2", "--out", folder / "grid")
    assert_user_error(refused, "holds another study", "batch.accumulation was 1, is 2")
    with StudyFolder(folder / "grid").locked():
        assert_user_error(podium_here("study", *GRID, "--out", folder / "grid"), "another process is working on")
    assert run_files(folder / "grid") == before


@pytest.mark.slow
def test_a_study_whose_runs_cannot_begin_leaves_nothing_to_mix_with(tmp_path):
    wrong = podium_ended(tmp_path, "study", *GRID, "schedule.warmup=50ep", "--out", "study", "--at-once", 1)
    assert wrong.returncode == 2
    assert "run 0: schedule.warmup = 50ep" in wrong.stderr
    right = podium_ended(tmp_path, "study", *GRID, "schedule.warmup=1ep", "--out", "study", "--runs", 1)
    assert right.returncode == 0, right.stderr
    assert [row["state"] for row in rows(tmp_path / "study")] == ["finished"]


@pytest.mark.parametrize("facts", ['{"seconds": "x"}', '{"importances": 7}', '{"command": [1]}', "[1"])
def test_small_facts_that_are_damaged_are_named(facts, tmp_path):
    study = StudyFolder(tmp_path)
    defined = study_from_tree({"recipe": "neuron", "values": {"optim.lr": [1e-3, 2e-3]}}, "here")
    study.write_definition(defined, check_values(defined), ["podium"])
    RecordLog(study.records_file).put(RunRecord(number=0, point=0, state="finished", values={}, seed=1, value=0.5))
    study.facts_file.write_text(facts)
    for words in (["status", tmp_path], [tmp_path]):
        assert_user_error(podium_here("study", *words), "study.json is damaged")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["neuron"], "nothing varies"),
        (["neuron", "optim.lr=1e-3,2e-3", "--at-once", "none"], "--at-once none"),
        (["neuron", "optim.rl=1e-3,2e-3"], "optim.rl"),
        (["neuron", "optim.lr=1e-4..1e-2:log"], "optim.lr"),
        (["neuron", "optim.lr=1e-3,2e-3", "--metric", "valid/accuracy"], "mode: min or max"),
        (["neuron", "optim.lr=1e-3,2e-3", "--time", "soon"], "30m"),
        (["nothing", "optim.lr=1e-3,2e-3"], "nothing"),
        (["status", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_told_in_one_sentence_and_leave_nothing(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_user_error(podium_here("study", *words), said)
    assert run_files(tmp_path) == []
