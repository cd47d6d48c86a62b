"""The picture of a plan: throughput, or seconds per epoch, against the number of devices, with its interval."""

from collections.abc import Sequence
from pathlib import Path

from podium.plan.intervals import Interval
from podium.ui.figures import ACCENT, INK, MUTED, figure, save, style


def draw_plan(
    path: Path,
    title: str,
    what: str,
    counts: Sequence[int],
    predicted: Sequence[Interval],
    known: Sequence[tuple[int, float]] = (),
    perfect: Sequence[tuple[int, float]] = (),
) -> Path:
    """Write a PNG file; `known` are measured values, `perfect` those of scaling without any loss."""
    with style():
        fig = figure()
        axes = fig.subplots()
        axes.fill_between(
            counts, [p.low for p in predicted], [p.high for p in predicted], color=ACCENT, alpha=0.15, linewidth=0,
            label="nine of ten",
        )  # fmt: skip
        axes.plot(counts, [p.value for p in predicted], color=ACCENT, marker="o", markersize=3, label="predicted")
        if perfect:
            axes.plot(*zip(*perfect, strict=True), color=MUTED, linestyle=":", label="perfect scaling")
        if known:
            axes.plot(*zip(*known, strict=True), color=INK, linestyle="none", marker="x", label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(counts), [f"{count:,}" for count in counts])
        axes.set_xlabel("devices" if known else "replicas")
        axes.set_ylabel(what)
        axes.set_title(title)
        axes.legend()
        return save(fig, path)
