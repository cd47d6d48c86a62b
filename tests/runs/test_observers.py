"""Observers hear of records, validations, checkpoints and the end, and cannot change or end a training."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import podium as public
from podium.machine.process_state import process_state_kept
from podium.recipe.sections.log import LogSection
from podium.runs import own_code
from podium.runs.folder import Run
from podium.runs.observers import Observers, watched_by
from tests.support.own import write_own
from tests.support.processes import assert_user_error, podium_here
from tests.support.watching import WATCHERS


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "CHOICE", own_code.Choice())
    for name in ("watchers", "mine", "blocks"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # those of another test's folder
    (tmp_path / "watchers.py").write_text(WATCHERS)
    write_own(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(project, out: str, *observers: str) -> tuple[Run, str]:
    names = ",".join(f"watchers.py:{name}" for name in observers)
    done = podium_here("train", "mine.yaml", f"log.observers=[{names}]", "--out", out)
    assert done.returncode == 0, done.stderr
    return Run(project / out), " ".join(done.stderr.split())


def diary(run: Run) -> list:
    return [json.loads(line) for line in (run.path / "diary.jsonl").read_text().splitlines()]


def heard(entries: list, event: str) -> list:
    return [entry[1:] for entry in entries if entry[0] == event]


def test_an_observer_hears_the_four_events(project):
    run, _ = trained(project, "run", "Diary")
    entries, records = diary(run), run.records()
    assert heard(entries, "record") == [[record] for record in records]
    validated = [record for record in records if "valid/loss" in record]
    assert heard(entries, "validation") == [[r["update"], {"loss": r["valid/loss"]}] for r in validated]
    saved = heard(entries, "checkpoint")
    assert [update for update, _, _ in saved] == [4, 8, 12, 16]
    assert all((run.checkpoints / name).is_dir() for _, name, _ in saved)
    assert {size for _, _, size in saved} == {run.summary()["num_parameters"]}
    assert heard(entries, "end") == [["done", run.summary()["weights_sha256"]]]
    assert entries[-1][0] == "end"


def test_an_observer_cannot_change_a_training_and_one_that_raises_is_switched_off(project):
    plain, _ = trained(project, "plain")
    watched, said = trained(project, "watched", "Meddler", "Failing", "Diary")
    assert watched.summary()["weights_sha256"] == plain.summary()["weights_sha256"]
    assert [r["train/loss"] for r in watched.records()] == [r["train/loss"] for r in plain.records()]
    assert [record["update"] for (record,) in heard(diary(watched), "record")] == [4, 8, 12, 16]
    assert said.count("the observer watchers.py:Meddler is switched off, and the run goes on: SystemExit: 5") == 1
    assert said.count("the observer watchers.py:Failing is switched off, and the run goes on: AttributeError") == 1
    assert "in on_record: self.missing(record)" in said
    assert "PODIUM_MEDDLED" not in os.environ


@pytest.mark.slow
def test_two_instances_with_observers_have_the_weights_of_one_without(project, podium):
    plain, _ = trained(project, "plain")
    names = "log.observers=[watchers.py:Meddler,watchers.py:Diary]"
    done = podium("train", "mine.yaml", names, "--instances", 2, "--out", "two")
    assert done.returncode == 0, done.stderr
    run = Run(project / "two")
    assert run.summary()["weights_sha256"] == plain.summary()["weights_sha256"]
    assert len(heard(diary(run), "end")) == 1
    assert [update for update, _, _ in heard(diary(run), "checkpoint")] == [4, 8, 12, 16]


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ("watchers.py", ["expected names of the form mine.py:Watcher"]),
        ("gone.py:Diary", ["log.observers: there is no file", "gone.py"]),
        ("no_such_module:Diary", ["log.observers: there is no module no_such_module"]),
        ("watchers.py:Diarist", ["watchers.py has no class Diarist"]),
        ("mine.py:Squares", ["Squares has none of the methods on_record, on_validation, on_checkpoint, on_end"]),
    ],
)
def test_a_name_that_leads_to_no_observer_is_told_and_no_run_is_left(project, names, parts):
    assert_user_error(podium_here("train", "mine.yaml", f"log.observers=[{names}]", "--out", "run"), *parts)
    assert not (project / "run").exists()


@pytest.mark.slow
def test_the_code_of_an_observer_is_kept_and_a_changed_one_is_told_of_and_used(project):
    run, _ = trained(project, "run", "Diary")
    (record,) = run.environment()["code-observers"]
    assert "watchers.py" in record["files"]
    assert (run.path / "code-observers" / "1" / "watchers.py").read_text() == WATCHERS
    (project / "watchers.py").write_text(WATCHERS.replace('"end", summary["state"]', '"end", "changed"'))
    done = podium_here("resume", run.path, "--checkpoint", 12)
    assert done.returncode == 0, done.stderr
    assert "watchers.py has changed since" in " ".join(done.stderr.split())
    assert heard(diary(run), "end")[-1][0] == "changed"
    done = podium_here("resume", run.path, "--checkpoint", 12, "--code", "copy")
    assert done.returncode == 0, done.stderr
    assert heard(diary(run), "end")[-1][0] == "done"


@pytest.mark.slow
def test_a_run_continues_with_other_observers(project):
    run, _ = trained(project, "run")
    done = podium_here("resume", run.path, "log.observers=[watchers.py:Diary]", "--checkpoint", 12)
    assert done.returncode == 0, done.stderr
    assert [record["update"] for (record,) in heard(diary(run), "record")] == [16]


@pytest.mark.slow
def test_observers_of_a_run_from_elsewhere_ask_before_they_run(project, monkeypatch):
    run, _ = trained(project, "run", "Diary")
    monkeypatch.setenv("PODIUM_STATE", str(project / "state"))
    own_code.remember(str(project / "mine.py"), [])  # only the observer is asked about
    resume = ("resume", run.path, "--checkpoint", 12)
    assert_user_error(podium_here(*resume), "would run code that was never run here", "watchers.py:Diary", "--trust")
    assert podium_here("validate", run.path).returncode == 0, "which runs no observers"
    (project / "watchers.py").unlink()
    assert_user_error(podium_here(*resume), "code-observers/1/watchers.py", "--trust")
    shutil.rmtree(run.path / "code-observers")
    assert_user_error(podium_here(*resume), "continue without it, with log.observers=[]")


def test_fit_takes_objects_and_classes(tmp_path):
    class Losses:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_record(self, run, record):
            self.seen.append(record["train/loss"])

    mine, x = Losses(), np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)

    def fit(**options):
        return public.fit(
            torch.nn.Linear(2, 1), (x, x[:, :1]), loss="mse", length="2ep", log={"report": False}, **options
        )

    run = fit(observers=[mine, Losses], out=tmp_path / "run")
    assert mine.seen == [record["train/loss"] for record in Run(run.path).records()] != []
    with pytest.raises(public.UserError, match="int has none of the methods"):
        fit(observers=[3], out=tmp_path / "no")
    with pytest.raises(public.UserError, match="Losses is defined inside of a function"):
        fit(observers=[mine], instances=2, replicas=2, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_where_other_processes_train_copies_of_fits_observers_hear_of_it_once(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    from watchers import Counting

    model, x = torch.nn.Linear(2, 1), np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)

    def fit(out: str, **options):
        return public.fit(
            model, (x, x[:, :1]), loss="mse", length="2ep", log={"report": False}, replicas=2,
            micro_batch=8, seed=3, out=project / out, **options,
        )  # fmt: skip

    mine = Counting("heard.txt")
    run = fit("watched", instances=2, observers=[mine])
    assert int((run.path / "heard.txt").read_text()) == len(Run(run.path).records()) > 0
    assert mine.heard == 0
    assert run.summary["weights_sha256"] == fit("alone").summary["weights_sha256"]
    # Whoever opens such a run calls nobody.
    (run.path / "heard.txt").unlink()
    run.best.load()
    fit("other")
    assert not (run.path / "heard.txt").exists()


def test_an_observer_that_hangs_is_switched_off_and_the_training_goes_on(project):
    done = podium_here(
        "train", "mine.yaml", "log.observers=[watchers.py:Endless,watchers.py:Diary]", "log.observer_timeout=0.3",
        "--out", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stderr.split())
    assert text.count("the observer watchers.py:Endless is switched off, and the run goes on: it took more than") == 1
    assert "log.observer_timeout = 0.3 s" in text
    assert heard(diary(Run(project / "run")), "end")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_two_observers_of_one_class_are_told_apart(tmp_path):
    class Once:
        def on_record(self, run, record):
            raise ValueError("enough")

    warnings: list[str] = []
    with watched_by([Once(), Once()]), Observers(LogSection(), Run(tmp_path), warnings.append) as observers:
        observers.record({"update": 1})
        observers.record({"update": 2})
    assert [text.partition(",")[0] for text in warnings] == [
        "the observer Once is switched off",
        "the observer Once 2 is switched off",
    ]


def test_the_state_of_the_process_is_put_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def state() -> list:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            Path.cwd(),
            dict(os.environ),
            signal.getsignal(signal.SIGTERM),
        ]

    code: dict = {}
    exec(WATCHERS, code)
    before = state()
    with process_state_kept():
        code["Meddler"]()
        assert all(now != then for now, then in zip(state(), before, strict=True))
    assert state() == before
