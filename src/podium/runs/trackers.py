"""Experiment trackers that people already run: MLflow and Trackio, as sinks for metric records.

`local`: MLflow's files lie in `mlruns` beside the run folders, Trackio's database where Trackio keeps it (TRACKIO_DIR);
an address sends to a server. Opened by `metrics.py`.
"""

import contextlib
import importlib.util
import io
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import read_limited
from podium.recipe.sections.log import LogSection

Record = Mapping[str, float]
#: MLflow's limits for one request
_MAX_PARAMS, _MAX_TEXT = 100, 500
_MLFLOW_VARIABLES = {
    # The store in plain files needs no database; MLflow asks for this where one is wanted.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A server that is gone must not hold a training up for the minutes that MLflow would try.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MLflow:
    """A run of MLflow. Its number is kept in the run folder, so that a resumed training goes on with it."""

    def __init__(self, section: LogSection, folder: Path, tree: Mapping[str, Any]) -> None:
        for name, value in _MLFLOW_VARIABLES.items():
            os.environ.setdefault(name, value)
        with _unsaid():
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient

            self._metric = Metric
            address = (folder.resolve().parent / "mlruns").as_uri() if section.mlflow == "local" else section.mlflow
            self._client = MlflowClient(tracking_uri=address)
            number = folder / "mlflow-run"
            if number.exists():
                self._run = kept_id(number, "MLflow")
                self._client.update_run(self._run, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(section.project)
            experiment = found.experiment_id if found else self._client.create_experiment(section.project)
            made = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
            self._run = kept_id(number, "MLflow", lambda: made)
            params = [Param(key, value[:_MAX_TEXT]) for key, value in flat_keys(tree)]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._run, params=params[start : start + _MAX_PARAMS])

    def write(self, record: Record) -> None:
        now, update = int(time.time() * 1000), int(record["update"])
        metrics = [self._metric(name, float(value), now, update) for name, value in record.items() if "/" in name]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, failed: bool = False) -> None:
        with _unsaid():
            self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


class Trackio:
    """A run of Trackio, in its database on this machine or on a server."""

    def __init__(self, section: LogSection, folder: Path, tree: Mapping[str, Any]) -> None:
        # Trackio knows a run by its name alone, and folders of the same name may lie in different places.
        name = f"{folder.resolve().name}-{kept_id(folder / 'trackio-run', 'Trackio')}"
        with _unsaid():
            import trackio

            self._finish = trackio.finish  # that of the run alone would be repeated, aloud, when the process ends
            self._run = trackio.init(
                project=section.project,
                name=name,
                config=dict(flat_keys(tree)),
                resume="allow",
                server_url=None if section.trackio == "local" else section.trackio,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, record: Record) -> None:
        self._run.log({name: value for name, value in record.items() if "/" in name}, step=int(record["update"]))

    def close(self, failed: bool = False) -> None:
        with _unsaid():
            self._finish()  # Trackio does not record how a run ended


def check_trackers(section: LogSection) -> None:
    """Raise UserError where a tracker that the recipe asks for is not installed."""
    for name, value in (("mlflow", section.mlflow), ("trackio", section.trackio)):
        if value != "off" and not _is_installed(name):
            raise UserError(f"log.{name} = {value} needs the package {name}: pip install 'podium[{name}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # the module is there without what describes it
        return False


def kept_id(path: Path, service: str, make: Callable[[], str] = lambda: secrets.token_hex(8)) -> str:
    """Return the id of a run for a service, made once and kept in `path` for the whole life of the run.

    The folder's name would not do: it may be that of somebody else's run.
    """
    if not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(), encoding="utf-8")
    try:
        text = read_limited(path, 128).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = system_reason(error) if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{path} cannot be read: {reason}; move it away, and {service} begins a new run") from None
    if not text.isalnum():
        raise UserError(
            f"{path} does not hold the id of a run of {service}: move it away, and {service} begins a new run"
        )
    return text


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a recipe with their values as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Keep what a tracker says about itself off the screen."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
