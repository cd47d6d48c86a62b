"""`report.html`: one self-contained file with curves, the workload's pictures, where the time went, the recipe.

Drawn when a run ends and by `podium predict`, and written last, so that it shows the same times as `summary.json`.
Everything it shows is read from the run folder.
"""

import base64
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from podium import __version__
from podium.contract import Prediction, Workload
from podium.errors import writing
from podium.recipe.loading import to_yaml
from podium.runs.curves import draw_curves, shorter_than_an_epoch
from podium.runs.folder import Run, replace_file, write_json
from podium.training.evaluate import ModelOutputs
from podium.ui.console import clock_text, number

_PHASE_COLOURS = {
    "startup": "#c7cdd4",
    "compile": "#94a3b8",
    "train": "#2563eb",
    "input_wait": "#e4572e",
    "communication": "#a855f7",
    "valid": "#0f9d78",
    "checkpoint": "#eab308",
    "report": "#64748b",
}


@dataclass(frozen=True)
class Report:
    """A report that is drawn, and only waits for the last summary to be written."""

    run: Run
    prediction: Prediction
    #: SVG drawings, one for each metric
    curves: list[str]

    def write(self) -> Path:
        """Write `report.html` with the summary as it is now."""
        page = Environment(
            loader=PackageLoader("podium.runs"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        ).get_template("report.html.j2")
        run, summary, environment = self.run, self.run.summary(whole=True), self.run.environment()
        pictures = [picture for picture in self.prediction.pictures if picture.path.exists()]
        html = page.render(
            title=run.path.resolve().name,
            version=__version__,
            state=run.state(),
            started=_date(environment.get("started")),
            command=[shlex.quote(word) for word in run.command()] if environment else [],
            weights=(summary.get("weights_sha256") or "–")[:16],
            recipe_sha256=(summary.get("recipe_sha256") or "–")[:16],
            cards=_cards(summary),
            phases=_phases(summary.get("seconds", {})),
            curves=self.curves,
            pictures=[(picture, _embedded(picture.path)) for picture in pictures],
            tables=self.prediction.tables,
            recipe=to_yaml(run.recipe().tree()),
            environment=_environment_rows(environment),
        )
        replace_file(run.report_file, html.encode())
        return run.report_file


def draw_report(run: Run, workload: Workload, model: nn.Module, device: torch.device, micro_batch: int) -> Report:
    """Predict with the model as it is, keep pictures and tables in the run, and draw the curves."""
    outputs = ModelOutputs(model, workload, micro_batch, device)
    with writing(run.pictures):
        run.pictures.mkdir(parents=True, exist_ok=True)
        prediction = workload.predict(model, outputs, run.pictures)
    write_json(
        run.pictures / "prediction.json",
        {
            "pictures": [asdict(picture) | {"path": picture.path.name} for picture in prediction.pictures],
            "tables": [asdict(table) for table in prediction.tables],
        },
    )
    return Report(run, prediction, draw_curves(run))


@dataclass(frozen=True)
class Card:
    """A number at the top of the page, with what it is and, below, what goes with it."""

    value: str
    name: str
    note: str = ""


def _cards(summary: Mapping[str, Any]) -> list[Card]:
    if not summary:
        return []
    valid, averaged, topology = summary["valid"], summary.get("average", {}), summary["topology"]
    best = valid["best"]
    cards = []
    for name, value in valid["last"].items():
        note = f"best {number(best[name])} at update {best['update']:,}" if name in best else ""
        cards.append(Card(number(value), f"validation {name}", note))
    cards += [
        Card(number(value), f"validation {name}", "averaged weights")
        for name, value in averaged.items()
        if name != "weights"
    ]
    instances = topology["instances"]
    epochs = "" if shorter_than_an_epoch(summary) else f" · {summary['epochs']:.4g} epochs"
    return [
        *cards,
        Card(f"{summary['updates']:,}", "updates", f"of {summary['total_updates']:,}{epochs}"),
        Card(number(summary["samples_per_second"]), "samples/s", f"{summary['samples']:,} samples"),
        Card(clock_text(summary["seconds"]["total"]), "time"),
        Card(f"{summary['cpu_percent']:.0f} %", "processor use", f"{instances} instance{'s' if instances > 1 else ''}"),
        Card(f"{summary['num_parameters']:,}", "parameters"),
    ]


def _phases(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total = max(1e-9, sum(seconds.get(name, 0.0) for name in _PHASE_COLOURS))
    return [
        {
            "name": name.replace("_", " "),
            "colour": colour,
            "seconds": f"{seconds[name]:.1f} s",
            "percent": 100 * seconds[name] / total,
        }
        for name, colour in _PHASE_COLOURS.items()
        if seconds.get(name, 0.0) / total >= 0.001
    ]


def _environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in environment.items():
        if name in ("torch_build", "command", "started"):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {text}" for key, text in value.items())
        rows.append((name.replace("_", " "), str(value)))
    return rows


def _date(text: str | None) -> str:
    """Return an ISO date and time as people read it, to the minute."""
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M") if text else ""


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
