"""The report on an image classifier: confusion matrix, worst mistakes, accuracy by class."""

from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from podium.contract import Picture, Prediction
from podium.ui import figures
from podium.ui.table import Table

_NUM_MISTAKES = 24
_NUM_COLUMNS = 6
#: inches of one image with its two lines, and of the image itself
_TILE_WIDTH, _TILE_HEIGHT, _IMAGE_SIDE = 1.55, 1.95, 1.38
# Beyond this many classes the numbers in the cells of the confusion matrix no longer fit.
_MAX_CLASSES_WITH_NUMBERS = 20
_MAX_CLASSES_WITH_NAMES = 40
_BLUES = LinearSegmentedColormap.from_list("blues", ["#f5f7fa", "#dbe7fd", "#7ea6f4", figures.ACCENT, "#16389c"])


def predict(
    images: NDArray,
    labels: NDArray,
    output: NDArray,
    class_names: tuple[str, ...],
    folder: Path,
    form: Literal["logits", "softmax"],
) -> Prediction:
    """Return pictures and tables for `output` (samples, classes): logits or, in the form `softmax`, probabilities.

    `images` are (samples, 1, height, width), where bright is drawn dark, or (samples, height, width, 3) in colour.
    """
    probability = output.astype(np.float64) if form == "softmax" else _softmax(output.astype(np.float64))
    predicted = probability.argmax(axis=1)
    num_classes = len(class_names)
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)
    wrong = np.flatnonzero(predicted != labels)
    # Most confidently wrong first; ties in the order of the samples.
    worst = wrong[np.argsort(-probability[wrong, predicted[wrong]], kind="stable")][:_NUM_MISTAKES]
    num_wrong, num_samples = len(wrong), len(labels)
    summary = f"{num_samples - num_wrong:,} of {num_samples:,} test images are classified correctly"
    return Prediction(
        pictures=[
            Picture(
                "Confusion matrix",
                _draw_confusion(counts, class_names, folder / "confusion.png"),
                f"{summary}. Numbers count images; colours show the share of the true class.",
            ),
            Picture(
                "Worst mistakes",
                _draw_mistakes(images, labels, predicted, probability, worst, class_names, folder / "mistakes.png"),
                f"The {len(worst)} of {num_wrong:,} mistakes in which the model was most confident."
                if num_wrong
                else "There are none.",
            ),
        ],
        tables=[_table(counts, class_names)],
    )


def predict_labels(labels: NDArray, output: NDArray, class_names: tuple[str, ...], folder: Path) -> Prediction:
    """Return the same for samples that are no images: logits (samples, classes) and labels; mistakes as a table."""
    probability = _softmax(output.astype(np.float64))
    predicted = probability.argmax(axis=1)
    num_classes = len(class_names)
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)
    wrong = np.flatnonzero(predicted != labels)
    worst = wrong[np.argsort(-probability[wrong, predicted[wrong]], kind="stable")][:_NUM_MISTAKES]
    summary = f"{len(labels) - len(wrong):,} of {len(labels):,} samples are classified correctly"
    mistakes = [
        [
            str(sample),
            f"{class_names[predicted[sample]]}  {_percent(probability[sample, predicted[sample]])}",
            f"{class_names[labels[sample]]}  {_percent(probability[sample, labels[sample]])}",
        ]
        for sample in worst
    ]
    confusion = Picture(
        "Confusion matrix",
        _draw_confusion(counts, class_names, folder / "confusion.png", "samples"),
        f"{summary}. Numbers count samples; colours show the share of the true class.",
    )
    tables = [_table(counts, class_names, "samples")]
    if mistakes:
        caption = f"The {len(worst)} of {len(wrong):,} mistakes in which the model was most confident."
        tables.append(Table("Worst mistakes", ["sample", "predicted", "true"], mistakes, caption))
    return Prediction([confusion], tables)


def _draw_confusion(counts: NDArray, names: tuple[str, ...], path: Path, what: str = "test images") -> Path:
    num_classes = len(names)
    share = 100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    long_names = max(map(len, names)) > 3
    with figures.style():
        fig = figures.figure(8.2, 7.0)
        fig.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)
        axes = fig.subplots()
        # The square root keeps small confusions visible beside the diagonal.
        image = axes.imshow(share, cmap=_BLUES, norm=PowerNorm(0.5, 0, 100))
        axes.grid(False)
        if num_classes <= _MAX_CLASSES_WITH_NAMES:
            axes.set_xticks(
                range(num_classes), names, rotation=40 if long_names else 0, ha="right" if long_names else "center"
            )
            axes.set_yticks(range(num_classes), names)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        axes.tick_params(length=0, colors=figures.INK)
        if num_classes <= _MAX_CLASSES_WITH_NAMES:
            axes.set_xticks(np.arange(1, num_classes) - 0.5, minor=True)
            axes.set_yticks(np.arange(1, num_classes) - 0.5, minor=True)
            axes.grid(which="minor", color="white", linewidth=1.5)
            axes.tick_params(which="minor", length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        if num_classes <= _MAX_CLASSES_WITH_NUMBERS:
            size = 10 if num_classes <= 12 else 7
            for true, predicted in np.argwhere(counts > 0):
                axes.text(
                    predicted,
                    true,
                    f"{counts[true, predicted]:,}",
                    ha="center",
                    va="center",
                    fontsize=size,
                    fontweight="bold" if true == predicted else "normal",
                    color="white" if share[true, predicted] > 35 else figures.INK,
                )
        accuracy = counts.trace() / max(counts.sum(), 1)
        axes.set_title(f"Confusion matrix: {100 * accuracy:.2f} % of {counts.sum():,} {what} correct", pad=12)
        bar = fig.colorbar(image, ax=axes, shrink=0.7, aspect=28, pad=0.02, ticks=[0, 1, 5, 20, 50, 100])
        bar.ax.set_yticklabels(["0 %", "1 %", "5 %", "20 %", "50 %", "100 %"])
        bar.set_label("share of the true class")
        bar.outline.set_visible(False)
        return figures.save(fig, path)


def _draw_mistakes(
    images: NDArray,
    labels: NDArray,
    predicted: NDArray,
    probability: NDArray,
    worst: NDArray,
    names: tuple[str, ...],
    path: Path,
) -> Path:
    num_rows = max(1, -(-len(worst) // _NUM_COLUMNS))
    width, height = _TILE_WIDTH * _NUM_COLUMNS + 0.2, _TILE_HEIGHT * num_rows + 0.5
    with figures.style():
        fig = figures.figure(width, height, arranged=False)
        # One set of axes, in inches from the top left: a set for every image takes longer than a short training.
        axes = fig.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        title = "Worst mistakes, most confident first: predicted class above, true class below"
        axes.text(0.11, 0.27, title, size=11, weight="bold", color=figures.INK)
        if not len(worst):
            axes.text(0.11, 1.2, "No mistakes: every test image is classified correctly.", color=figures.MUTED)
        for place, sample in enumerate(worst):
            row, column = divmod(place, _NUM_COLUMNS)
            middle, top = 0.1 + _TILE_WIDTH * (column + 0.5), 0.5 + _TILE_HEIGHT * row + 0.3
            image = images[sample] if images.shape[-1] == 3 else images[sample, 0]
            bottom = _draw_image(axes, image, middle, top)
            for label, at, side, colour, weight in (
                (predicted[sample], top - 0.06, "bottom", figures.SECOND, "bold"),
                (labels[sample], bottom + 0.06, "top", figures.INK, "normal"),
            ):
                text = f"{names[label]}  {_percent(probability[sample, label])}"
                axes.text(middle, at, text, ha="center", va=side, fontsize=9, color=colour, weight=weight)
        axes.set(xlim=(0, width), ylim=(height, 0))
        return figures.save(fig, path)


def _draw_image(axes: Axes, image: NDArray, middle: float, top: float) -> float:
    """Draw an image below `top`, with a frame; return where it ends."""
    high, wide = (_IMAGE_SIDE * size / max(image.shape[:2]) for size in image.shape[:2])
    extent = (middle - wide / 2, middle + wide / 2, top + high, top)
    axes.imshow(image, cmap="gray_r", interpolation="nearest", extent=extent, aspect="auto")
    axes.add_patch(Rectangle((extent[0], top), wide, high, fill=False, edgecolor=figures.GRID, linewidth=0.8))
    return top + high


def _table(counts: NDArray, names: tuple[str, ...], what: str = "images") -> Table:
    rows = []
    for label, name in enumerate(names):
        num_true, num_predicted = counts[label].sum(), counts[:, label].sum()
        others = counts[label].copy()
        others[label] = 0
        confused = f"{names[others.argmax()]} ({others.max():,})" if others.any() else "–"
        right = counts[label, label]
        rows.append([name, f"{num_true:,}", _ratio(right, num_true), _ratio(right, num_predicted), confused])
    rows.append(["all", f"{counts.sum():,}", _ratio(counts.trace(), counts.sum()), "", ""])
    return Table(
        "Accuracy by class",
        ["class", what, "accuracy", "precision", "most often taken for"],
        rows,
        f"Accuracy: share of the class's {what} classified correctly. Precision: share of the predictions of the class "
        "that are correct.",
    )


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def _percent(share: float) -> str:
    """Format a share with few digits, but never round it to 0 or 100 %."""
    if share > 0.999:
        return ">99.9 %"
    if share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.1f} %"


def _ratio(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "–"
