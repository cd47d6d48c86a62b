"""MLflow and Trackio hold what was measured, with the real packages, and their trouble never ends a training."""

import importlib.util
import json
import subprocess
import sys

import pytest

from podium.recipe.sections.log import LogSection
from podium.runs.folder import Run
from podium.runs.metrics import Telemetry
from tests.support.processes import assert_user_error, podium_afresh, podium_here
from tests.support.recipes import TINY

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
needs_trackio = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
RECIPE = [*TINY["mnist"], "checkpoint.every=2up", "log.report=false", "log.project=digits"]
RECIPE += ["train.length=8up", "checkpoint.keep=20"]
#: prints what Trackio has of a project, by its own interface
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("digits")
print(json.dumps({
    "name": name,
    "config": SQLiteStorage.get_run_config("digits", name),
    "logs": SQLiteStorage.get_logs("digits", name),
}))
"""


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_tracker_is_told_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    done = podium_here("train", *TINY["mnist"], f"log.{name}=local", "--out", tmp_path / "run")
    assert_user_error(done, f"log.{name} = local needs the package {name}", f"pip install 'podium[{name}]'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_what_is_no_place_for_a_tracker_is_told(tmp_path, name):
    done = podium_here("train", *TINY["mnist"], f"log.{name}=on", "--out", tmp_path / "run")
    assert_user_error(done, f"log.{name} =", "expected off, local or the address of a server")


def closely(values: dict[int, float]) -> dict:
    return {update: pytest.approx(value, rel=1e-6) for update, value in values.items()}


@needs_mlflow
@pytest.mark.slow
def test_mlflow_holds_recipe_and_records_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    for args in (["train", *RECIPE, "log.mlflow=local", "--out", "run"], ["resume", "run", "--checkpoint", 2]):
        done = podium_afresh(tmp_path, *args)
        assert done.returncode == 0, done.stderr
        assert "mlflow" not in (done.stdout + done.stderr).lower()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    run, client = Run(tmp_path / "run"), MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optim.name"] == run.recipe().optim.name
    for name in ("train/loss", "valid/loss"):
        shown = {entry.step: entry.value for entry in client.get_metric_history(found.info.run_id, name)}
        assert shown == closely({r["update"]: r[name] for r in run.records() if name in r})


@needs_mlflow
@pytest.mark.slow
def test_mlflow_shows_a_training_that_failed_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    section = LogSection(tensorboard=False, mlflow="local")
    with pytest.raises(ZeroDivisionError), Telemetry(section, Run(tmp_path / "run"), {}, 0, pytest.fail):
        raise ZeroDivisionError
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert found.info.status == "FAILED"


@needs_trackio
@pytest.mark.slow
def test_trackio_holds_recipe_and_records_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for args in (["train", *RECIPE, "log.trackio=local", "--out", "run"], ["resume", "run", "--checkpoint", 2]):
        done = podium_afresh(tmp_path, *args)
        assert done.returncode == 0, done.stderr
        assert "trackio" not in (done.stdout + done.stderr).lower()
    read = subprocess.run([sys.executable, "-c", READ_TRACKIO], capture_output=True, text=True, timeout=300)
    assert read.returncode == 0, read.stderr
    found, run = json.loads(read.stdout), Run(tmp_path / "run")
    assert found["name"].startswith("run-")
    assert found["config"]["optim.name"] == run.recipe().optim.name
    for name in ("train/loss", "valid/loss"):
        shown = {entry["step"]: entry[name] for entry in found["logs"] if name in entry}
        assert shown == closely({r["update"]: r[name] for r in run.records() if name in r})


@needs_mlflow
@pytest.mark.slow
def test_a_tracking_server_that_is_not_there_is_told_once_and_the_run_goes_on(tmp_path):
    warnings: list[str] = []
    section = LogSection(tensorboard=False, mlflow="http://127.0.0.1:9")  # nobody listens there
    with Telemetry(section, Run(tmp_path), {"optim": {"lr": 0.1}}, 0, warnings.append) as telemetry:
        for update in (1, 2):
            telemetry.write({"update": update, "train/loss": 0.5})
    (warning,) = warnings
    assert warning.endswith("the run goes on without records for MLflow")
    assert len(Run(tmp_path).records()) == 2
