"""What is shown after training where a user's workload does not say: by the kind of its output.

regression        predicted against true, and the errors of every output
classification    confusion matrix, worst mistakes, accuracy by class
anything else     the loss of every sample, and the samples with the largest
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from podium.contract import Outputs, Picture, Prediction, Workload, named_outputs
from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.ui import figures
from podium.ui.table import Table
from podium.workloads import classifier_report
from podium.workloads.own.losses import Kind, target_field

#: more would make no visible difference, and take memory
MAX_SAMPLES = 5_000
_MAX_OUTPUTS, _MAX_CLASSES, _NUM_WORST, _MAX_LOSSES = 25, 200, 20, 500
_COLUMNS = 5


def default_prediction(workload: Workload, model: nn.Module, outputs: Outputs, folder: Path, kind: Kind) -> Prediction:
    """Return pictures and tables of the test split, as suits what the model returns."""
    if kind == "other" and not _is_runnable(workload, model):
        return _losses_by_sample(workload, model, folder)
    given, got = outputs("test", MAX_SAMPLES, named_outputs)
    field = target_field(given)
    target, output = given[field], next(iter(got.values()))
    if kind != "regression" and _are_classes(target, output):
        images = next((rows for name, rows in given.items() if name != field), target)
        return _classification(
            images,
            target.reshape(-1).astype(np.int64),
            output,
            folder,
        )
    flat = output.reshape(len(output), -1)
    if target.dtype.kind == "f" and flat.shape == target.reshape(len(target), -1).shape:
        return _regression(target.reshape(flat.shape), flat, folder)
    return _losses_by_sample(workload, model, folder)


def _is_runnable(workload: Workload, model: nn.Module) -> bool:
    """Return whether the model can be run on its own: a general loss may do something else with it."""
    device = next(model.parameters()).device
    batch = {name: rows.to(device) for name, rows in workload.example(1).items()}
    try:
        with torch.inference_mode():
            return bool(named_outputs(model.eval()(*workload.inputs(batch))))
    except Exception:
        return False


def _are_classes(target: NDArray, output: NDArray) -> bool:
    labels = target.dtype.kind in "iub" and target.size == len(target)
    if not labels and target.dtype.kind == "f" and output.size == len(output) == target.size:
        labels = bool(np.isin(target, (0, 1)).all())  # a single logit for two classes
    return labels and output.ndim == 2 and output.shape[1] <= _MAX_CLASSES


# --- regression -------------------------------------------------------------------------------------------------------


def _regression(target: NDArray, output: NDArray, folder: Path) -> Prediction:
    num_outputs = min(target.shape[1], _MAX_OUTPUTS)
    error = output.astype(np.float64) - target
    mse, variance = np.square(error).mean(axis=0), target.astype(np.float64).var(axis=0)
    r2 = 1 - mse / np.where(variance > 0, variance, np.nan)
    rows = [
        [
            str(place),
            f"{error[:, place].mean():+.4g}",
            f"{error[:, place].std():.4g}",
            f"{mse[place]:.4g}",
            _r2(r2[place]),
        ]
        for place in range(num_outputs)
    ]
    more = f", the first {num_outputs} of {target.shape[1]} outputs" if num_outputs < target.shape[1] else ""
    table = Table(
        "Errors",
        ["output", "bias", "std", "MSE", "R²"],
        rows,
        f"Predicted minus true, {len(target):,} samples{more}; R² is the share of the variance that is explained.",
    )
    picture = Picture(
        "Predicted against true",
        _draw_scatter(target[:, :num_outputs], output[:, :num_outputs], r2, folder / "predicted.png"),
        f"{len(target):,} samples{more}. On the line: predicted exactly.",
    )
    return Prediction([picture], [table])


def _r2(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4f}"


def _draw_scatter(target: NDArray, output: NDArray, r2: NDArray, path: Path) -> Path:
    count = target.shape[1]
    columns = min(_COLUMNS, count)
    num_rows = -(-count // columns)
    with figures.style():
        size = {1: 4.6, 2: 3.8, 3: 3.2}.get(columns, 2.4)
        fig = figures.figure(size * columns, (size - 0.2) * num_rows)
        axes = fig.subplots(num_rows, columns, squeeze=False)
        alpha = float(np.clip(300 / len(target), 0.12, 0.6))
        for place, ax in enumerate(axes.flat):
            if place >= count:
                ax.set_axis_off()
                continue
            ax.scatter(target[:, place], output[:, place], s=8, color=figures.ACCENT, alpha=alpha, linewidths=0)
            ends = [float(target[:, place].min()), float(target[:, place].max())]
            ax.plot(ends, ends, color=figures.SECOND, linewidth=1.4)
            ax.set_title(f"{f'output {place}' if count > 1 else 'Predicted against true'}: R² {_r2(r2[place])}")
        fig.supxlabel("true", color=figures.MUTED, fontsize=10)
        fig.supylabel("predicted", color=figures.MUTED, fontsize=10)
        return figures.save(fig, path)


# --- classification ---------------------------------------------------------------------------------------------------


def _classification(inputs: NDArray, labels: NDArray, output: NDArray, folder: Path) -> Prediction:
    if output.shape[1] == 1:  # one logit for the second of two classes
        output = np.concatenate([np.zeros_like(output), output], axis=1)
    names = tuple(str(number) for number in range(max(output.shape[1], int(labels.max()) + 1)))
    output = np.pad(output, ((0, 0), (0, len(names) - output.shape[1])), constant_values=-np.inf)
    images = _as_images(inputs)
    if images is not None:
        return classifier_report.predict(images, labels, output, names, folder, "logits")
    return classifier_report.predict_labels(labels, output, names, folder)


def _as_images(inputs: NDArray) -> NDArray | None:
    """Return inputs as pictures to look at, if they are grey or coloured images."""
    if inputs.ndim != 4 or min(inputs.shape[2:]) < 8:
        return None
    if inputs.shape[1] == 1:
        return inputs
    if inputs.shape[1] != 3:
        return None
    images = inputs.transpose(0, 2, 3, 1).astype(np.float32)
    low, high = images.min(), images.max()
    return (images - low) / max(float(high - low), 1e-12)


# --- anything else ----------------------------------------------------------------------------------------------------


def _losses_by_sample(workload: Workload, model: nn.Module, folder: Path) -> Prediction:
    source = workload.source("test")
    device = next(model.parameters()).device
    count = min(len(source), _MAX_LOSSES)
    losses = np.empty(count)
    buffers = empty_buffers(source.fields, 1)
    model.eval()
    with torch.inference_mode():
        for sample in range(count):
            start_gather(source, SampleRequest(np.array([sample], dtype=np.int64)), buffers)()
            batch = {name: torch.from_numpy(rows.copy()).to(device) for name, rows in buffers.items()}
            loss = workload.loss(model, batch)
            losses[sample] = float(loss.sum) / max(1, loss.count)
    worst = np.argsort(-losses, kind="stable")[:_NUM_WORST]
    with figures.style():
        fig = figures.figure(7.0, 3.6)
        axes = fig.subplots()
        axes.hist(losses, bins=min(40, max(5, count // 5)), color=figures.ACCENT)
        axes.set_title("Losses of samples")
        axes.set_xlabel("loss")
        axes.set_ylabel("samples")
        path = figures.save(fig, folder / "losses.png")
    caption = f"{count:,} samples of {len(source):,}; mean {losses.mean():.4g}, median {np.median(losses):.4g}."
    return Prediction(
        [Picture("Losses of samples", path, caption)],
        [
            Table(
                "Samples with the largest loss",
                ["sample", "loss"],
                [[str(n), f"{losses[n]:.4g}"] for n in worst],
                caption,
            )
        ],
    )
