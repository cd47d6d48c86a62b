"""Metric records and where they go: JSON lines always, TensorBoard and Weights & Biases on request.

A record is one flat mapping (`train/loss`, `valid/accuracy`, `time/input_wait_s`) with the
update, epoch and samples it belongs to.
"""

import io
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import append_regular, read_limited
from podium.recipe.sections.log import LogSection
from podium.runs.folder import Run

Record = Mapping[str, float]


def check_available(section: LogSection) -> None:
    """Raise UserError where a sink is not installed; called before anything is on disk."""
    if section.wandb != "off":
        _import_wandb(section)


class Sink(Protocol):
    """A place for records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


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
        *,
        lead: bool = True,
    ) -> None:
        """Open the sinks that `section` names, on instance 0, for the records after update `after`.

        Raise UserError where the account or the settings of Weights & Biases are at fault.
        """
        self._sinks: dict[str, Sink] = {}
        self._warn = warn
        if not lead:  # instance 0 writes for all
            return
        self._open(run.metrics_file.name, lambda: JsonLines(run, after))
        if section.tensorboard:
            self._open("TensorBoard", lambda: TensorBoard(run.tensorboard))
        if section.wandb != "off":
            self._open("Weights & Biases", lambda: WeightsAndBiases(section, run.path, tree))

    def write(self, record: Record) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(record)
            except Exception as error:
                self._switch_off(name, error)

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
                sink.close()
            except Exception as failure:
                del self._sinks[name]
                self._switch_off(name, failure)


class _Misconfigured(Exception):
    """What the recipe asks of a service cannot work, today or tomorrow."""


class AppendedFile:
    """A file that grows at its end. What was written is with the system when `append` returns: a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = append_regular(path)

    def append(self, data: bytes) -> None:
        with writing(self._path):
            while data:  # a disk that fills up takes a part first and refuses the rest
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """One JSON object per line. Those of updates that are done again after a resume are dropped."""

    def __init__(self, run: Run, after: int) -> None:
        run.forget_after(after)
        self._file = AppendedFile(run.metrics_file)

    def write(self, record: Record) -> None:
        self._file.append((json.dumps(record) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as a TensorBoard event file.

    Written at once, in TensorBoard's own record format. Its event writer waits up to two minutes, and prints a
    traceback from its thread when the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendedFile | None = None
        # Imported before training begins: it takes longer than hundreds of updates of a small model.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._framed: Any = RecordWriter

    def write(self, record: Record) -> None:
        event, summary = self._event.Event, self._summary.Summary
        update, now = int(record["update"]), time.time()
        events = []
        if self._file is None:
            self._file = AppendedFile(self._folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}")
            events.append(event(wall_time=now, file_version="brain.Event:2"))
            # Readers drop what an earlier, interrupted part of this run wrote about this update and later ones.
            begin = self._event.SessionLog(status=self._event.SessionLog.START)
            events.append(event(wall_time=now, step=update, session_log=begin))
        values = [summary.Value(tag=name, simple_value=value) for name, value in record.items() if "/" in name]
        events.append(event(wall_time=now, step=update, summary=summary(value=values)))
        framed = io.BytesIO()
        for one in events:
            self._framed(framed).write(one.SerializeToString())
        self._file.append(framed.getvalue())

    def close(self) -> None:
        if self._file is not None:
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
                id=wandb_id(folder / "wandb" / "id"),
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

    def close(self) -> None:
        self._run.finish()


def _import_wandb(section: LogSection) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(f"log.wandb = {section.wandb} needs the package wandb: pip install 'podium[wandb]'") from None
    return wandb


def wandb_id(path: Path) -> str:
    """Return an id for the whole life of the run: the folder's name may be that of somebody else's run."""
    if not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(secrets.token_hex(8), encoding="utf-8")
    try:
        text = read_limited(path, 128).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = system_reason(error) if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{path} cannot be read: {reason}; move it away, and W&B begins a new run") from None
    if not text.isalnum():
        raise UserError(f"{path} does not hold the id of a W&B run: move it away, and W&B begins a new run")
    return text
