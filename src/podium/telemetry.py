"""Metric records and where they go: JSON lines always, TensorBoard and Weights & Biases on request.

Owns the `log` section. A record is one flat mapping (`train/loss`, `valid/accuracy`, `time/input_wait_s`) with the
update, epoch and samples it belongs to.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TextIO

from podium.errors import UserError
from podium.schema import Section

Record = Mapping[str, float]


class LogSection(Section):
    """Where metric records go beside `metrics.jsonl`, and whether pictures are made at the end."""

    tensorboard: bool = True
    #: predict after the last update and write report.html (`podium predict` does it later)
    report: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "podium"


class Sink(Protocol):
    """A place for records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Telemetry:
    """Hands every record to every sink. Use as a context manager."""

    def __init__(self, section: LogSection, folder: Path, metrics_file: Path, tree: Mapping[str, Any]) -> None:
        self._sinks: list[Sink] = [JsonLines(metrics_file)]
        if section.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard"))
        if section.wandb != "off":
            self._sinks.append(WeightsAndBiases(section, folder, tree))

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


class JsonLines:
    """One JSON object a line, flushed as written: a killed run loses at most the line it was writing."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, record: Record) -> None:
        if self._writer is None:  # imported at the first record: it takes longer than the first updates
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=int(record["update"]))
        for name, value in record.items():
            if "/" in name:
                self._writer.add_scalar(name, value, int(record["update"]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A W&B run; `offline` keeps it in the run folder for `wandb sync` later."""

    def __init__(self, section: LogSection, folder: Path, tree: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"log.wandb = {section.wandb} needs the package wandb: pip install 'podium[wandb]'"
            ) from None
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = wandb.init(
            project=section.wandb_project,
            name=folder.name,
            id=folder.name,
            dir=str(folder),
            config=dict(tree),
            mode="online" if section.wandb == "online" else "offline",
            resume="allow",
        )

    def write(self, record: Record) -> None:
        self._run.log(dict(record), step=int(record["update"]))

    def close(self) -> None:
        self._run.finish()
