"""The report after training: predicted against true parameters, residuals, and example cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from podium.contract import Picture, Prediction
from podium.ui import figures
from podium.ui.table import Table
from podium.workloads.neuron.data import BIN_MS

#: More cells would make no visible difference, and their voltages take memory.
MAX_SAMPLES = 5_000
#: Example cells, by their quantile when cells are ordered by error.
_EXAMPLES = (("Predicted well", 0.05), ("Typical", 0.5), ("Predicted badly", 0.95))
_COLUMNS = 5
_LINK = "#c5ccd6"
_SCALE_MV = 50.0
#: From unit parameters (n, parameters) to mV (n, bins, probes), at the probes that are shown.
Resimulate = Callable[[NDArray], NDArray]


@dataclass(frozen=True)
class Quality:
    """How well one parameter is predicted."""

    name: str
    bias: float
    std: float
    mse: float
    r2: float


def quality(target: NDArray, output: NDArray, names: Sequence[str]) -> list[Quality]:
    """Return one entry per parameter, in order."""
    error = output.astype(np.float64) - target
    mse, variance = np.square(error).mean(axis=0), target.astype(np.float64).var(axis=0)
    r2 = 1 - mse / np.where(variance > 0, variance, np.nan)
    rows = zip(names, error.mean(axis=0), error.std(axis=0), mse, r2, strict=True)
    return [Quality(name, *map(float, numbers)) for name, *numbers in rows]


def predict(
    frames: NDArray,
    target: NDArray,
    output: NDArray,
    parameter_names: Sequence[str],
    probe_names: Sequence[str],
    folder: Path,
    *,
    volts: tuple[float, float] | None = None,
    resimulate: Resimulate | None = None,
) -> Prediction:
    """Write the pictures to `folder`.

    `volts` (offset, unit) converts frames to mV: frame = (mV - offset) / unit. With `resimulate` as well, predictions
    are also judged by the voltages they produce.
    """
    resimulate = resimulate if volts else None
    qualities = quality(target, output, parameter_names)
    with figures.style():
        pictures = [
            Picture(
                "Predicted against true parameters",
                _draw_scatter(target, output, qualities, folder / "parameters.png"),
                f"{len(target):,} test cells; unit range. On the line: predicted exactly. "
                "R² is the share of a parameter's variance that is explained, σ the spread of the error.",
            ),
            Picture(
                "Example cells",
                _draw_examples(
                    frames, target, output, parameter_names, probe_names, volts, resimulate, folder / "examples.png"
                ),
                "Voltages at the probes (one scale, shifted apart) and the cell's parameters."
                + (" Dashed: the cell simulated again with the predicted parameters." if resimulate else ""),
            ),
        ]
    return Prediction(pictures, [_residual_table(qualities, len(target))])


def _residual_table(qualities: Sequence[Quality], num_cells: int) -> Table:
    ordered = sorted(qualities, key=lambda q: q.mse)
    rows = [[q.name, f"{q.bias:+.3f}", f"{q.std:.3f}", f"{q.mse:.4f}", f"{q.r2:.3f}"] for q in ordered]
    means = [float(np.mean([getattr(q, part) for q in qualities])) for part in ("bias", "std", "mse", "r2")]
    rows.append(["mean", f"{means[0]:+.3f}", f"{means[1]:.3f}", f"{means[2]:.4f}", f"{means[3]:.3f}"])
    return Table(
        "Residuals, best parameter first",
        ["parameter", "bias", "std", "MSE", "R²"],
        rows,
        f"Predicted minus true in unit range, {num_cells:,} test cells; predicting the mean gives an MSE of 1/3.",
    )


def _draw_scatter(target: NDArray, output: NDArray, qualities: Sequence[Quality], path: Path) -> Path:
    num_rows = -(-len(qualities) // _COLUMNS)
    fig = figures.figure(10.0, 2.4 * num_rows + 0.3)
    axes = fig.subplots(num_rows, _COLUMNS, squeeze=False, sharex=True, sharey=True)
    alpha = float(np.clip(300 / len(target), 0.12, 0.6))
    for index, ax in enumerate(axes.flat):
        if index >= len(qualities):
            ax.set_axis_off()
            continue
        q = qualities[index]
        shown = np.clip(output[:, index], -1.25, 1.25)
        ax.scatter(target[:, index], shown, s=7, color=figures.ACCENT, alpha=alpha, linewidths=0)
        ax.plot([-1, 1], [-1, 1], color=figures.SECOND, linewidth=1.4)
        ax.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), xticks=(-1, 0, 1), yticks=(-1, 0, 1), aspect="equal")
        ax.set_title(q.name, fontsize=10, pad=17)
        note = f"R² {q.r2:.2f}   σ {q.std:.2f}"
        ax.text(0, 1.03, note, transform=ax.transAxes, fontsize=9, color=figures.MUTED, va="bottom")
    fig.supxlabel("true", color=figures.MUTED, fontsize=10)
    fig.supylabel("predicted", color=figures.MUTED, fontsize=10)
    return figures.save(fig, path)


def _draw_examples(
    frames: NDArray,
    target: NDArray,
    output: NDArray,
    parameter_names: Sequence[str],
    probe_names: Sequence[str],
    volts: tuple[float, float] | None,
    resimulate: Resimulate | None,
    path: Path,
) -> Path:
    error = np.square(output - target).mean(axis=1)
    ranking = np.argsort(error, kind="stable")
    cells = [int(ranking[round(place * (len(ranking) - 1))]) for _, place in _EXAMPLES]
    offset, unit = volts or (0.0, 1.0)
    given = frames[cells] * unit + offset
    again = resimulate(np.clip(output[cells], -1, 1)) if resimulate else None

    fig = figures.figure(10.0, 3.5 * len(cells))
    grid = fig.add_gridspec(len(cells), 2, width_ratios=(2.3, 1))
    for row, (cell, (label, _)) in enumerate(zip(cells, _EXAMPLES, strict=True)):
        ax = fig.add_subplot(grid[row, 0])
        _draw_traces(ax, given[row], None if again is None else again[row], probe_names, millivolts=volts is not None)
        ax.set_title(f"{label}: cell {cell}, MSE {error[cell]:.3f}")
        if row == 0 and again is not None:
            lines = [
                Line2D([], [], color=figures.ACCENT, linewidth=1.6, label="given"),
                Line2D([], [], color=figures.INK, linewidth=1.0, linestyle=(0, (3, 2)), label="from prediction"),
            ]
            ax.legend(handles=lines, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=9, borderpad=0)
        if row == len(cells) - 1:
            ax.set_xlabel("time in ms")
        _draw_parameters(fig.add_subplot(grid[row, 1]), target[cell], output[cell], parameter_names, legend=row == 0)
    return figures.save(fig, path)


def _draw_traces(
    ax: Axes, frame: NDArray, again: NDArray | None, probe_names: Sequence[str], *, millivolts: bool
) -> None:
    num_bins, num_probes = frame.shape
    time = np.arange(num_bins) * BIN_MS
    step = float(np.ptp(frame, axis=0).max()) * 0.9 or 1.0
    levels = []
    for probe in range(num_probes):
        shift = -probe * step - float(np.median(frame[:, probe]))
        levels.append(-probe * step)
        ax.plot(time, frame[:, probe] + shift, color=figures.PALETTE[probe % len(figures.PALETTE)], linewidth=1.6)
        if again is not None:
            ax.plot(time, again[:, probe] + shift, color=figures.INK, linewidth=0.9, linestyle=(0, (3, 2)))
    ax.set_yticks(levels, list(probe_names))
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0, num_bins * BIN_MS)
    # All probes share one scale, shown once: above the quiet start of the first trace.
    if millivolts:
        ax.plot([4, 4], [0.25 * step, 0.25 * step + _SCALE_MV], color=figures.MUTED, linewidth=2, solid_capstyle="butt")
        ax.text(6, 0.25 * step + _SCALE_MV / 2, f"{_SCALE_MV:.0f} mV", va="center", fontsize=9, color=figures.MUTED)
    ax.grid(visible=False, axis="y")


def _draw_parameters(ax: Axes, target: NDArray, output: NDArray, names: Sequence[str], *, legend: bool) -> None:
    y = np.arange(len(names))
    ax.hlines(y, target, output, color=_LINK, linewidth=3, zorder=1)
    ax.scatter(target, y, s=22, facecolors="white", edgecolors=figures.INK, zorder=2, label="true")
    ax.scatter(output, y, s=18, color=figures.SECOND, zorder=3, label="predicted", linewidths=0)
    ax.set(yticks=y, xlim=(-1.3, 1.3), xticks=(-1, 0, 1), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticklabels(list(names), fontsize=8)
    ax.tick_params(axis="y", length=0)
    if legend:
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=9, borderpad=0, handletextpad=0.1)
