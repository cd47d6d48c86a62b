"""`report.html`: one self-contained file with curves, the workload's pictures, where the time went, the recipe.

Written when a run ends and by `podium predict`. Everything it shows is read from the run folder.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.ticker import LogLocator, NullLocator
from torch import nn

from podium import __version__
from podium.console import clock_text, number
from podium.errors import writing
from podium.evaluate import ModelOutputs
from podium.run import Run, replace_file, write_json
from podium.table import Table
from podium.workloads import figures
from podium.workloads.base import Picture, Prediction, Workload

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


def write_report(run: Run, workload: Workload, model: nn.Module, device: torch.device, micro_batch: int) -> Prediction:
    """Predicts with the model as it is, keeps pictures and tables in the run, and renders the report."""
    outputs = ModelOutputs(model, workload, micro_batch, device)
    with writing(run.pictures):
        prediction = workload.predict(model, outputs, run.pictures)
    write_json(
        run.pictures / "prediction.json",
        {
            "pictures": [asdict(picture) | {"path": picture.path.name} for picture in prediction.pictures],
            "tables": [asdict(table) for table in prediction.tables],
        },
    )
    render_report(run)
    return prediction


def render_report(run: Run) -> Path:
    """Renders `report.html` from what is in the run folder."""
    summary, records = run.summary(), run.records()
    kept = _kept_prediction(run)
    with writing(run.pictures):
        curves = _draw_curves(run, records)
    page = Environment(
        loader=PackageLoader("podium"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.j2")
    html = page.render(
        title=run.path.name,
        version=__version__,
        summary=summary,
        headline=_headline(summary),
        phases=_phases(summary.get("seconds", {})),
        curves=curves and _embedded(curves),
        pictures=[(picture, _embedded(picture.path)) for picture in kept.pictures if picture.path.exists()],
        tables=kept.tables,
        recipe=run.recipe_file.read_text(encoding="utf-8"),
        environment=_environment_rows(run.environment()),
    )
    replace_file(run.report_file, html.encode())
    return run.report_file


def _kept_prediction(run: Run) -> Prediction:
    path = run.pictures / "prediction.json"
    if not path.exists():
        return Prediction([], [])
    kept = json.loads(path.read_bytes())
    return Prediction(
        [Picture(**{**picture, "path": run.pictures / picture["path"]}) for picture in kept["pictures"]],
        [Table(**table) for table in kept["tables"]],
    )


def _draw_curves(run: Run, records: list[dict[str, Any]]) -> Path | None:
    """Loss over epochs with the learning rate below it."""
    if not records:
        return None
    train = [(r["epoch"], r["train/loss"]) for r in records if "train/loss" in r]
    valid = [(r["epoch"], r["valid/loss"]) for r in records if "valid/loss" in r]
    rates = [(r["epoch"], r["train/lr"]) for r in records if "train/lr" in r]
    with figures.style():
        fig = figures.figure(9, 4.6)
        top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        top.plot(*zip(*train, strict=True), color=figures.ACCENT, alpha=0.55, linewidth=1.2, label="training")
        if valid:
            marker = "o" if len(valid) <= 40 else None
            top.plot(*zip(*valid, strict=True), color=figures.SECOND, marker=marker, markersize=3.5, label="validation")
        top.set_title("Loss")
        losses = [loss for _, loss in train + valid]
        if min(losses) > 0 and max(losses) > 4 * min(losses):
            top.set_yscale("log")
            top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            top.yaxis.set_minor_locator(NullLocator())
        top.legend()
        bottom.plot(*zip(*rates, strict=True), color=figures.MUTED, linewidth=1.2)
        bottom.set_title("Learning rate")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("epoch")
        return figures.save(fig, run.pictures / "curves.png")


def _headline(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("state", str(summary.get("state", "unknown")))]
    valid = summary.get("valid", {}).get("last", {})
    facts += [(f"validation {name}", number(value)) for name, value in valid.items()]
    if summary:
        facts += [
            ("epochs", f"{summary['epochs']:.4g}"),
            ("samples/s", number(summary["samples_per_second"])),
            ("time", clock_text(summary["seconds"]["total"])),
            ("parameters", f"{summary['num_parameters']:,}"),
            ("processor in use", f"{summary['cpu_percent']:.0f} %"),
        ]
    return facts


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
        if name in ("torch_build", "command"):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {text}" for key, text in value.items())
        rows.append((name.replace("_", " "), str(value)))
    return rows


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
