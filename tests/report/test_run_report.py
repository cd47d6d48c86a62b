"""The report and the last lines of a run: they show what the run folder holds, and agree with one another."""

import json
import re

import pytest

from podium.contract import Prediction
from podium.runs.folder import Run, open_run
from podium.ui.console import clock_text, number
from podium.workloads.mnist.workload import Workload
from tests.support.processes import podium_here
from tests.support.recipes import TINY

#: the best validation is not the last
RECIPE = [*TINY["mnist"], "schedule.name=stepped", "schedule.at=[1ep]", "schedule.factor=[20]", "schedule.warmup=0",
          "average=mean", "log.report=true"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Run, str, str]:
    """A run, its report, and what was printed at its end."""
    run = Run(tmp_path_factory.mktemp("report") / "run")
    done = podium_here("train", *RECIPE, "--out", run.path)
    assert done.returncode == 0, done.stderr
    return run, run.report_file.read_text(), done.stdout


def cards(html: str) -> dict[str, str]:
    """By name, the values of the cards with their notes."""
    found = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span>(?:<em>(.*?)</em>)?</div>", html)
    shown: dict[str, str] = {}
    for value, name, note in found:
        shown[name] = f"{shown[name]} and {value} {note}" if name in shown else f"{value} {note}".strip()
    return shown


def data_of(html: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html)[1])


def test_report_and_summary_agree_on_time_and_processor_use(trained):
    run, html, _ = trained
    summary, shown = run.summary(), cards(html)
    assert shown["time"].startswith(f"{clock_text(summary['seconds']['total'])} ")
    assert shown["processor use"].startswith(f"{summary['cpu_percent']:.0f} %")
    assert f"report <em>{summary['seconds']['report']:.1f} s" in html
    parts = [value for name, value in summary["seconds"].items() if name != "total"]
    assert sum(parts) == pytest.approx(summary["seconds"]["total"], abs=0.1)


def test_the_best_value_stands_beside_the_last_with_its_update(trained):
    run, html, printed = trained
    valid = run.summary()["valid"]
    assert valid["best"]["update"] < run.summary()["updates"]
    for name, last in valid["last"].items():
        best = f"best {number(valid['best'][name])} at update {valid['best']['update']:,}"
        assert cards(html)[f"validation {name}"].startswith(f"{number(last)} {best}")
        assert f"{number(last)} ({best})" in printed


def test_the_averaged_weights_are_in_summary_report_and_last_table(trained):
    run, html, printed = trained
    averaged = run.summary()["average"]
    assert averaged["loss"] == run.records()[-1]["valid/average_loss"]
    for name in run.summary()["valid"]["last"]:
        assert f"{number(averaged[name])} averaged weights" in cards(html)[f"validation {name}"]
        assert re.search(rf"validation {name}, averaged weights\W+{re.escape(number(averaged[name]))}", printed)


def test_every_metric_has_a_curve_and_the_page_says_when_and_how(trained):
    run, html, _ = trained
    (curves,) = data_of(html)["curves"]
    for part in curves["parts"]:
        for name, values in part["metrics"].items():
            recorded = [record[name] for record in run.records() if name in record]
            assert values == pytest.approx(recorded, rel=1e-4)
    names = {name for part in curves["parts"] for name in part["metrics"]}
    assert {"train/loss", "valid/loss", "valid/accuracy", "valid/average_loss", "train/lr"} <= names
    assert run.environment()["started"][:16].replace("T", " ") in html
    words = re.findall(r"<span>(.*?)</span>", re.search(r"<code>(.*?)</code>", html)[1])
    assert words[:4] == ["podium", "train", *TINY["mnist"][:2]]


def test_a_workload_without_pictures_gets_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(Workload, "predict", lambda *_: Prediction([], []))
    done = podium_here("train", *TINY["mnist"], "train.length=1ep", "log.report=true", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.summary()["state"] == "done"
    html = run.report_file.read_text()
    assert data_of(html)["curves"][0]["parts"]
    assert "<img" not in html
