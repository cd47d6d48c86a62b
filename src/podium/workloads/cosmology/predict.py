"""The report after training: slices, distributions and power spectra of predicted and true gas, and the loss compared
with guesses that need no model. Called by `Workload.predict`.

Arrays are (n, channel, x, y, z), scaled as in the files; n crops.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from podium.contract import Picture, Prediction
from podium.ui import figures
from podium.ui.table import Table
from podium.workloads.cosmology.data import FIELDS
from podium.workloads.cosmology.power import power_spectrum
from podium.workloads.cosmology.scales import DENSITY_LOG, TEMPERATURE_LOG, VELOCITY_SCALE_KM_S, to_density

#: More cells would make no visible difference, and their fields take memory.
_MAX_CELLS = 1 << 22
#: factor from scaled values to powers of ten
_DENSITY_DEX, _TEMPERATURE_DEX = DENSITY_LOG / np.log(10), TEMPERATURE_LOG / np.log(10)
_DIFFERENCE = "RdBu_r"
#: Colour scales ignore this share at either end: otherwise a few cells would determine how all others look.
_OUTLIERS_PERCENT = 0.5
_NUM_BINS = 80


def max_samples(crop: int) -> int:
    """Return how many crops to predict."""
    return max(4, _MAX_CELLS // crop**3)


def predict(
    nbody: NDArray[np.float32],
    target: NDArray[np.float32],
    output: NDArray[np.float32],
    folder: Path,
    *,
    lambda_rho: float = 0.0,
    cell_mpc: float | None = None,
) -> Prediction:
    """Write the pictures to `folder`. `cell_mpc` is the side of a cell in Mpc/h, if the units of the box are known."""
    crops = f"{len(target):,} test crops of {target.shape[-1]}³ cells"
    with figures.style():
        pictures = [
            Picture(
                "Slices",
                _draw_slices(nbody, target, output, folder / "slices.png", cell_mpc),
                "One plane of the crop with the median error. Columns that share a colour bar share their colours; "
                "convergence is the flow of dark matter into a cell, which heats the gas.",
            ),
            Picture(
                "Distributions",
                _draw_distributions(target, output, folder / "distributions.png", known=cell_mpc is not None),
                f"All cells of {crops}. Below: temperature against density, coloured by the number of cells.",
            ),
            Picture(
                "Power spectrum of the gas density",
                _draw_power(nbody, target, output, folder / "power.png", cell_mpc),
                f"Mean over {crops}, tapered towards their faces. A ratio below 1: structure of that size is missing.",
            ),
        ]
    return Prediction(
        pictures, [loss_table(nbody, target, output, lambda_rho), _correlation_table(nbody, target, output)]
    )


# ------------------------------------------------------------------------------------------------------- the tables


def guesses(nbody: NDArray[np.float32], target: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Return predictions without a model: density and velocities of the dark matter copied, and every field's mean."""
    mean = np.broadcast_to(target.mean(axis=(0, 2, 3, 4), dtype=np.float64)[:, None, None, None], target.shape)
    copied = np.concatenate([nbody[:, :1], mean[:, 1:2], nbody[:, 1:]], axis=1, dtype=np.float32)
    return {"copying the N-body fields": copied, "predicting the mean": mean.astype(np.float32)}


def losses(target: NDArray[np.float32], output: NDArray[np.float32], lambda_rho: float) -> dict[str, float]:
    """Return the loss as in training, and the L1 of every field."""
    error = np.abs(output - target)
    found = {name: float(error[:, channels].mean(dtype=np.float64)) for name, channels in FIELDS.items()}
    loss = float(error.mean(dtype=np.float64))
    if lambda_rho:
        real = np.abs(to_density(output[:, 0]) - to_density(target[:, 0]))
        loss += lambda_rho * float(real.mean(dtype=np.float64))
    return {"loss": loss, **found}


def correlations(target: NDArray[np.float32], output: NDArray[np.float32]) -> dict[str, float]:
    """Return Pearson's coefficient over all cells, by field; nan if one of the two is constant."""
    found = {}
    for name, channels in FIELDS.items():
        parts = []
        for channel in range(5)[channels]:
            one, other = (array[:, channel].astype(np.float64) for array in (target, output))
            one, other = one - one.mean(), other - other.mean()
            norm = np.sqrt(np.square(one).sum() * np.square(other).sum())
            parts.append(float((one * other).sum() / norm) if norm > 0 else np.nan)
        found[name] = float(np.mean(parts))
    return found


def loss_table(
    nbody: NDArray[np.float32], target: NDArray[np.float32], output: NDArray[np.float32], lambda_rho: float
) -> Table:
    """Compare the loss of the run with those of the guesses."""
    rows = [
        [name, *(f"{value:.3e}" for value in losses(target, fields, lambda_rho).values())]
        for name, fields in {"this run": output, **guesses(nbody, target)}.items()
    ]
    return Table(
        "Loss compared with simple guesses",
        ["prediction", "loss", *FIELDS],
        rows,
        "Mean |difference| of scaled fields"
        + (f"; the loss adds {lambda_rho:g} times that of the density in real units" if lambda_rho else "")
        + ". Copying uses density and velocities of the dark matter, and the mean temperature.",
    )


def _correlation_table(nbody: NDArray[np.float32], target: NDArray[np.float32], output: NDArray[np.float32]) -> Table:
    run, copied = (
        correlations(target, output),
        correlations(target, guesses(nbody, target)["copying the N-body fields"]),
    )
    rows = [[name, *(_coefficient(values[name]) for values in (run, copied))] for name in FIELDS]
    return Table(
        "Correlation with the true field",
        ["field", "this run", "copying the N-body fields"],
        rows,
        "Over all cells, of scaled fields; velocity: mean of its components. A constant field has no correlation.",
    )


def _coefficient(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4f}"


# ------------------------------------------------------------------------------------------------------- the slices


def _draw_slices(
    nbody: NDArray[np.float32],
    target: NDArray[np.float32],
    output: NDArray[np.float32],
    path: Path,
    cell_mpc: float | None,
) -> Path:
    error = np.abs(output - target).mean(axis=(1, 2, 3, 4))
    crop = int(np.argsort(error, kind="stable")[len(error) // 2])
    # The plane with the most structure: others may be empty.
    plane = int(target[crop, 0].std(axis=(1, 2)).argmax())
    given, true, found = nbody[crop], target[crop, :, plane], output[crop, :, plane]
    # of scaled values per cell; in km/s per Mpc/h if the units are known
    unit = 1.0 if cell_mpc is None else VELOCITY_SCALE_KM_S / cell_mpc
    velocity_unit = 1.0 if cell_mpc is None else VELOCITY_SCALE_KM_S
    convergence = -unit * sum(np.gradient(given[1 + axis], axis=axis) for axis in range(3))[plane]
    speed = "velocity y" + (" in km/s" if cell_mpc else "")
    rows = [
        _SliceRow("Density", "log₁₀ ρ/ρ̄", "N-body density", "log₁₀ ρ/ρ̄", "magma", "magma",
                  given[0, plane] * _DENSITY_DEX, true[0] * _DENSITY_DEX, found[0] * _DENSITY_DEX, shared=True),
        _SliceRow("Temperature", _temperature_label(cell_mpc is not None), "N-body convergence",
                  "km/s per Mpc/h" if cell_mpc else "of scaled velocities", "PuOr_r", "inferno",
                  convergence, true[1] * _TEMPERATURE_DEX, found[1] * _TEMPERATURE_DEX),
        _SliceRow("Velocity along y", speed, "N-body velocity", speed, "PuOr_r", "PuOr_r",
                  given[2, plane] * velocity_unit, true[3] * velocity_unit, found[3] * velocity_unit, shared=True),
    ]  # fmt: skip
    side = target.shape[-1] * (cell_mpc or 1.0)
    fig = figures.figure(11.5, 8.0)
    fig.set_layout_engine("compressed")  # colour bars are then as high as the square planes
    axes = fig.subplots(len(rows), 4, sharex=True, sharey=True)
    for row, line in zip(rows, axes, strict=True):
        row.draw(fig, line, side)
    for ax in axes[-1]:
        ax.set_xlabel("z in Mpc/h" if cell_mpc else "z in cells")
    for ax in axes[:, 0]:
        ax.set_ylabel("y in Mpc/h" if cell_mpc else "y in cells")
    return figures.save(fig, path)


class _SliceRow:
    """One field: input, target, prediction and difference, each (y, z)."""

    def __init__(
        self,
        name: str,
        label: str,
        given_name: str,
        given_label: str,
        given_colours: str,
        colours: str,
        given: NDArray,
        true: NDArray,
        found: NDArray,
        *,
        shared: bool = False,
    ) -> None:
        self._names = (given_name, f"{name}: target", "prediction", "difference")
        self._label, self._given_label = label, given_label
        self._given_colours, self._colours = given_colours, colours
        self._given, self._true, self._found = given, true, found
        #: the input is of the same kind and uses the same colours
        self._shared = shared

    def draw(self, fig: Figure, axes: NDArray, side: float) -> None:
        given, true, found = self._given, self._true, self._found
        signed = self._colours.startswith("PuOr")
        limits = _limits([given, true, found] if self._shared else [true, found], signed=signed)
        given_limits = limits if self._shared else _limits([given], signed=self._given_colours.startswith("PuOr"))
        images = [
            _show(axes[0], given, self._given_colours, given_limits, side),
            _show(axes[1], true, self._colours, limits, side),
            _show(axes[2], found, self._colours, limits, side),
            _show(axes[3], found - true, _DIFFERENCE, _limits([found - true], signed=True), side),
        ]
        for ax, name in zip(axes, self._names, strict=True):
            ax.set_title(name, fontsize=10)
        for image, over, label in (
            (images[0], [axes[0]], self._given_label),
            (images[1], [axes[1], axes[2]], self._label),
            (images[3], [axes[3]], self._label),
        ):
            bar = fig.colorbar(image, ax=over, pad=0.02, aspect=24)
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0, labelsize=8)
            bar.set_label(label, fontsize=8, color=figures.MUTED)


def _show(ax: Axes, values: NDArray, colours: str, limits: tuple[float, float], side: float) -> AxesImage:
    image = ax.imshow(
        values, cmap=colours, vmin=limits[0], vmax=limits[1], origin="lower", extent=(0, side, 0, side),
        interpolation="nearest",
    )  # fmt: skip
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=8)
    return image


def _limits(parts: list[NDArray], *, signed: bool) -> tuple[float, float]:
    low, high = np.percentile(np.stack(parts), (_OUTLIERS_PERCENT, 100 - _OUTLIERS_PERCENT))
    if signed:
        most = float(max(abs(low), abs(high))) or 1.0
        return -most, most
    return float(low), float(high) if high > low else float(low) + 1.0


# ----------------------------------------------------------------------------------- distributions and power spectra


def _temperature_label(known: bool) -> str:
    return "log₁₀ T/10⁴ K" if known else "log₁₀ temperature"


def _draw_distributions(target: NDArray[np.float32], output: NDArray[np.float32], path: Path, *, known: bool) -> Path:
    both = {"target": target, "prediction": output}
    density = {name: (fields[:, 0] * _DENSITY_DEX).ravel() for name, fields in both.items()}
    heat = {name: (fields[:, 1] * _TEMPERATURE_DEX).ravel() for name, fields in both.items()}
    bins = [_bins(values) for values in (density, heat)]
    fig = figures.figure(10.0, 7.4)
    axes = fig.subplots(2, 2)
    labels = ("log₁₀ ρ/ρ̄", _temperature_label(known))
    for ax, values, edges, name, label in zip(
        axes[0], (density, heat), bins, ("Density", "Temperature"), labels, strict=True
    ):
        for (kind, numbers), colour in zip(values.items(), (figures.INK, figures.SECOND), strict=True):
            share, _ = np.histogram(numbers, edges, density=True)
            ax.stairs(np.where(share > 0, share, np.nan), edges, color=colour, linewidth=1.6, label=kind)
        ax.set(yscale="log", xlabel=label, ylabel="share of cells per dex")
        ax.set_title(name)
    axes[0, 0].legend(loc="best")
    counts = [np.histogram2d(density[kind], heat[kind], bins)[0] for kind in both]
    norm = LogNorm(1, max(2.0, float(max(count.max() for count in counts))))
    for ax, kind, count in zip(axes[1], both, counts, strict=True):
        mesh = ax.pcolormesh(*bins, np.ma.masked_less(count.T, 1), cmap="viridis", norm=norm, rasterized=True)
        ax.set(xlabel=labels[0], ylabel=labels[1])
        ax.set_title(f"Temperature against density: {kind}")
    bar = fig.colorbar(mesh, ax=list(axes[1]), pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("cells", color=figures.MUTED)
    return figures.save(fig, path)


def _bins(values: Mapping[str, NDArray]) -> NDArray:
    low, high = min(float(part.min()) for part in values.values()), max(float(part.max()) for part in values.values())
    return np.linspace(low, high if high > low else low + 1.0, _NUM_BINS + 1)


def mean_power(density: NDArray[np.float32], cell: float) -> tuple[NDArray, NDArray]:
    """Return k and the mean power spectrum of densities (n, x, y, z), tapered towards the faces: crops are not
    periodic, and the jumps there would look like structure of every size."""
    size = density.shape[-1]
    fade = np.hanning(size + 2)[1:-1]
    window = fade[:, None, None] * fade[None, :, None] * fade[None, None, :]
    window /= np.sqrt(np.square(window).mean())
    powers = []
    for cube in density.astype(np.float64):
        k, power, _ = power_spectrum(window * (cube - cube.mean()), size * cell)
        powers.append(power)
    return k, np.mean(powers, axis=0)


def _draw_power(
    nbody: NDArray[np.float32],
    target: NDArray[np.float32],
    output: NDArray[np.float32],
    path: Path,
    cell_mpc: float | None,
) -> Path:
    cell = cell_mpc or 1.0
    k, true = mean_power(to_density(target[:, 0]), cell)
    _, found = mean_power(to_density(output[:, 0]), cell)
    _, given = mean_power(to_density(nbody[:, 0]), cell)
    fig = figures.figure(8.0, 6.0)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
    lines = (
        ("target", true, figures.INK, "-"),
        ("prediction", found, figures.SECOND, "-"),
        ("N-body", given, figures.MUTED, "--"),
    )
    for name, power, colour, style in lines:
        upper.plot(k, power, color=colour, linestyle=style, linewidth=1.6, label=name)
        if name != "target":
            lower.plot(k, power / true, color=colour, linestyle=style, linewidth=1.6)
    upper.set(xscale="log", yscale="log", ylabel="P(k) in (Mpc/h)³" if cell_mpc else "P(k) in cells³")
    upper.set_title("Power spectrum of the density")
    upper.legend(loc="lower left")
    lower.axhline(1.0, color=figures.INK, linewidth=1.0)
    lower.set(ylim=(0, 2), xlabel="k in h/Mpc" if cell_mpc else "k in 1/cell", ylabel="ratio to target")
    lower.set_title("Against the target")
    lower.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lower.xaxis.set_major_formatter("{x:g}")
    lower.xaxis.set_minor_locator(NullLocator())
    return figures.save(fig, path)
