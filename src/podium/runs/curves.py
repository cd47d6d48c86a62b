"""The curves of a run in a notebook: one drawing for every metric that it recorded, and one of the learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from podium.runs.facts import shorter_than_an_epoch
from podium.runs.folder import Run
from podium.ui import figures

#: what records hold beside metrics
_NOT_METRICS = ("train/lr", "train/samples_per_second", "train/loss_scale", "train/skipped_updates")
_AVERAGE = "average_"
_LARGEST = 1e30

Points = list[tuple[float, float]]
#: what curves are drawn over
Along = Literal["epoch", "update"]


def draw_curves(run: Run) -> list[str]:
    """Return SVG drawings: the loss, the other metrics, the learning rate; none where there are no records."""
    summary = run.summary()
    best_update = summary.get("valid", {}).get("best", {}).get("update")
    along: Along = "update" if shorter_than_an_epoch(summary) else "epoch"
    records = [record for record in map(_drawable, run.records()) if record.get(along, -1) >= 0]
    drawings = []
    for name, lines in metric_lines(records, along).items():
        best = [
            (r[along], r[f"valid/{name}"]) for r in records if r.get("update") == best_update and f"valid/{name}" in r
        ]
        drawings.append(_draw(name, lines, best, along))
    if rates := [(record[along], record["train/lr"]) for record in records if "train/lr" in record]:
        drawings.append(_draw("learning rate", {"": rates}, [], along))
    return drawings


def _drawable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without numbers that cannot be drawn: not finite, or so large that an axis would never end."""
    return {key: value for key, value in record.items() if value == 0 or 1 / _LARGEST < abs(value) < _LARGEST}


def metric_lines(records: Sequence[Mapping[str, Any]], along: Along = "epoch") -> dict[str, dict[str, Points]]:
    """Return by metric, the loss first, the points (epoch or update, value) of training, validation and averaged
    weights."""
    found: dict[str, dict[str, Points]] = {"loss": {}}
    for record in records:
        for key, value in record.items():
            split, _, name = key.partition("/")
            if split not in ("train", "valid") or key in _NOT_METRICS:
                continue
            line = "training" if split == "train" else "validation"
            if split == "valid" and name.startswith(_AVERAGE):
                line, name = "averaged weights", name.removeprefix(_AVERAGE)
            found.setdefault(name, {}).setdefault(line, []).append((record[along], value))
    return {name: lines for name, lines in found.items() if lines}


def _draw(name: str, lines: Mapping[str, Points], best: Points, along: Along) -> str:
    colours = {"training": figures.ACCENT, "validation": figures.SECOND, "averaged weights": figures.THIRD}
    with figures.style():
        fig = figures.figure(4.6, 3.1)
        axes = fig.subplots()
        for line, points in lines.items():
            training = line == "training"
            axes.plot(
                *zip(*points, strict=True),
                color=colours.get(line, figures.MUTED),
                alpha=0.6 if training else 1.0,
                linewidth=1.2 if training else 1.6,
                marker="o" if len(points) == 1 or (len(points) <= 40 and not training) else None,
                markersize=3.5,
                label=line,
            )
        if best:
            colour = colours["validation"]
            axes.plot(*zip(*best, strict=True), "o", markersize=8, markerfacecolor="none", color=colour, label="best")
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel(along)
        _scale(axes, name, [value for points in lines.values() for _, value in points])
        if "" not in lines:
            axes.legend()
        return figures.to_svg(fig, name)


def _scale(axes: Axes, name: str, values: Sequence[float]) -> None:
    """Choose a logarithmic axis for losses over a wide range; start a learning rate at zero."""
    if name == "learning rate":
        axes.set_ylim(bottom=0)
    elif name.endswith(("loss", "perplexity")) and min(values) > 0 and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
