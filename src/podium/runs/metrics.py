"""Metric records and where they go: JSON lines always, TensorBoard, trackers and a user's observers on request.

A record is one flat mapping (`train/loss`, `valid/accuracy`, `time/input_wait_s`) with the
update, epoch and samples it belongs to. All values are numbers, except for the digests of the weights, which only the
JSON lines hold.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from podium.errors import UserError
from podium.recipe.sections.log import LogSection
from podium.runs import kubeflow
from podium.runs.appended_file import AppendedFile
from podium.runs.folder import Run
from podium.runs.observers import Observers
from podium.runs.tensorboard import TensorBoard
from podium.runs.trackers import MLflow, Trackio, check_trackers, kept_id

Record = Mapping[str, Any]


def check_available(section: LogSection) -> None:
    """Raise UserError where a sink is not installed; called before anything is on disk."""
    if section.wandb != "off":
        _import_wandb(section)
    check_trackers(section)


class Sink(Protocol):
    """A place for records."""

    def write(self, record: Record) -> None: ...

    def close(self, failed: bool = False) -> None:
        """End, and say so where others look; `failed`: the training ended by an error."""


class Telemetry:
    """Hands every record to every sink. Use as a context manager.

    A sink that fails is switched off with one warning: no training ends because its records cannot be kept.
    """

    def __init__(
        self,
        section: LogSection,
        run: Run,
        tree: Mapping[str, Any],
        after: int,
        warn: Callable[[str], None],
        observers: Observers | None = None,
        *,
        lead: bool = True,
        total_updates: int = 0,
    ) -> None:
        """Open the sinks that `section` and the environment name, on instance 0, for the records after update `after`.

        Raise UserError where the account or the settings of Weights & Biases are at fault.
        """
        self._sinks: dict[str, Sink] = {}
        self._warn, self._observers = warn, observers
        if not lead:  # instance 0 writes for all
            return
        self._open(run.metrics_file.name, lambda: JsonLines(run, after))
        if section.tensorboard:
            self._open("TensorBoard", lambda: TensorBoard(run.tensorboard))
        if section.wandb != "off":
            self._open("Weights & Biases", lambda: WeightsAndBiases(section, run.path, tree))
        if section.mlflow != "off":
            self._open("MLflow", lambda: MLflow(section, run.path, tree))
        if section.trackio != "off":
            self._open("Trackio", lambda: Trackio(section, run.path, tree))
        if kubeflow.ADDRESS in os.environ:
            self._open("Kubeflow", lambda: kubeflow.KubeflowStatus(os.environ, total_updates))

    def write(self, record: Record) -> None:
        numbers = {name: value for name, value in record.items() if not isinstance(value, str)}
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(record if isinstance(sink, JsonLines) else numbers)
            except Exception as error:
                self._switch_off(name, error)
        if self._observers is not None:
            self._observers.record(numbers)

    def _open(self, name: str, build: Callable[[], Sink]) -> None:
        try:
            self._sinks[name] = build()
        except _Misconfigured as error:
            raise UserError(str(error)) from error
        except Exception as error:
            self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        sink = self._sinks.pop(name, None)
        if sink is not None:
            with suppress(Exception):
                sink.close()
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._warn(f"{' '.join(reason.split())}; the run goes on without records for {name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.close(failed=kind is not None)
            except Exception as failure:
                del self._sinks[name]
                self._switch_off(name, failure)


class _Misconfigured(Exception):
    """What the recipe asks of a service cannot work, today or tomorrow."""


class JsonLines:
    """One JSON object per line. Those of updates that are done again after a resume are dropped."""

    def __init__(self, run: Run, after: int) -> None:
        run.forget_after(after)
        self._file = AppendedFile(run.metrics_file)

    def write(self, record: Record) -> None:
        self._file.append((json.dumps(record) + "\n").encode())

    def close(self, failed: bool = False) -> None:
        self._file.close()


class WeightsAndBiases:
    """A W&B run; `offline` keeps it in the run folder for `wandb sync` later."""

    def __init__(self, section: LogSection, folder: Path, tree: Mapping[str, Any]) -> None:
        wandb = _import_wandb(section)
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            self._run = wandb.init(
                project=section.wandb_project,
                name=folder.resolve().name,
                id=kept_id(folder / "wandb" / "id", "W&B"),
                dir=str(folder),
                config=dict(tree),
                mode=section.wandb,
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            sentence = f"log.wandb = {section.wandb}: {' '.join(str(error).split())}"
            own = (wandb.errors.UsageError, wandb.errors.AuthenticationError)  # else it cannot be reached, most likely
            raise (_Misconfigured if isinstance(error, own) else UserError)(sentence) from error

    def write(self, record: Record) -> None:
        self._run.log(dict(record), step=int(record["update"]))

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def _import_wandb(section: LogSection) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(f"log.wandb = {section.wandb} needs the package wandb: pip install 'podium[wandb]'") from None
    return wandb
