"""Whether a workload's losses and metrics are sums with their counts, so that micro-batches of any size add up."""

import math

import torch
from torch import Tensor

from podium.contract import Loss
from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.training.build import Training
from podium.transforms.seeding import seed_torch

#: split unevenly, as the last micro-batch of a validation may be
_PARTS = (4, 2, 1)
#: single precision, and other kernels for other sizes of a batch
_TOLERANCE = 1e-3


def tail_problem(training: Training) -> str:
    """Return what does not add up when samples are evaluated together and in uneven parts, or nothing."""
    source, model = training.task.valid_source, training.state.model
    num_samples = min(sum(_PARTS), len(source))
    buffers = empty_buffers(source.fields, num_samples)
    start_gather(source, SampleRequest(torch.arange(num_samples).numpy()), buffers)()
    batch = {name: torch.from_numpy(rows).to(training.placement.device) for name, rows in buffers.items()}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            whole = _loss(training, batch)
            parts, start = [], 0
            for size in _PARTS:
                if start < num_samples:
                    parts.append(_loss(training, {name: rows[start : start + size] for name, rows in batch.items()}))
                start += size
    finally:
        model.train(was_training)
    return _compared("loss", (whole.sum, whole.count), [(part.sum, part.count) for part in parts]) or next(
        filter(
            None,
            (
                _compared(f"metric {name}", value, [part.metrics[name] for part in parts if name in part.metrics])
                for name, value in whole.metrics.items()
            ),
        ),
        "",
    )


def _loss(training: Training, batch: dict[str, Tensor]) -> Loss:
    seed_torch(training.placement.device, "check", training.recipe.seed)
    return training.task.workload.loss(training.state.model, batch)


def _compared(what: str, whole: tuple[Tensor, int], parts: list[tuple[Tensor, int]]) -> str:
    total, count = float(whole[0]), whole[1]
    sums, counts = [float(part) for part, _ in parts], [number for _, number in parts]
    if count != sum(counts):
        return f"{what}: {count} counted together, {' + '.join(map(str, counts))} in parts"
    if not math.isfinite(total):
        return f"{what} is {total}"
    scale = max(abs(total), sum(map(abs, sums)))
    if abs(total - math.fsum(sums)) > _TOLERANCE * scale + 1e-6:
        shown = " + ".join(f"{value:.5g}" for value in sums)
        return f"{what}: {total:.5g} together, {shown} in parts; is it a mean where a sum is expected?"
    return ""
