"""Statistics of batch norm computed afresh for a validation (`valid.recalibrate`), by `validation.py` and `podium
validate`.

Running statistics are a mean over the last few updates, whose weights were others: at high rates they lag behind. Here
the weights as they are see some micro-batches of the training set, and each layer takes the mean over them of what
`running_mean` and `running_var` would have become: of the means, and of the unbiased variances.

Instances take micro-batches in turn and tell each other the statistics of each, which are then added in the order of
the micro-batches: the same bits on any number of instances. Dropout is off and nothing is varied on the device, as in
the validation that follows. Afterwards the model has the statistics that training keeps again.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat

import numpy as np
import torch
from torch import Tensor, nn

from podium.contract import Batch
from podium.data.feed import Feed
from podium.data.sample_order import order
from podium.data.sample_plan import samples_per_block
from podium.data.source import SampleRequest
from podium.distributed.lockstep import largest_span
from podium.layers.norm import AnyBatchNorm, inside
from podium.training.build import Training
from podium.training.evaluate import evaluation_mode


@contextmanager
def recalibrated(training: Training, model: nn.Module, update: int) -> Iterator[None]:
    """Give `model` fresh statistics inside the `with` block, if the recipe asks for them; collective.

    `update` is the number of updates made, from which the epoch of the samples follows.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, AnyBatchNorm) and module.running_mean is not None and not module.running_mean.is_meta
    ]
    if not training.recipe.valid.recalibrate:
        yield
        return
    kept = [([buffer.clone() for buffer in norm.buffers()], norm.momentum) for norm in norms]
    try:
        statistics = _statistics(training, model, norms, update)
        at = 0
        for buffer in _statistics_of(norms):
            buffer.copy_(statistics[at : at + buffer.numel()])
            at += buffer.numel()
        yield
    finally:
        for norm, (buffers, momentum) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            for buffer, before in zip(norm.buffers(), buffers, strict=True):
                buffer.copy_(before)


class _Alone:
    """A span of one: layers that share statistics between replicas take those of one micro-batch, which is as large as
    the micro-batches of their replicas together."""

    def exchange(self, tensor: Tensor, num_replicas: int) -> Tensor:
        return tensor


def _statistics(training: Training, model: nn.Module, norms: list[AnyBatchNorm], update: int) -> Tensor:
    """Return the statistics of all layers of this instance, one after the other, in double precision."""
    parallelism, source = training.parallelism, training.task.train_source
    group = parallelism.data_group
    size = training.recipe.batch.micro_batch * largest_span(training.state.model)
    count = min(training.recipe.valid.recalibrate, len(source) // size)
    own = range(group.index, count, group.count)
    batches: Iterator[Batch] = repeat({}, len(own))  # another instance of the pipeline has the samples
    feed: AbstractContextManager[Iterator[Batch]] = nullcontext(batches)
    if parallelism.takes_samples:
        feed = _micro_batches(training, own, size, update // training.task.lengths.updates_per_epoch)
    num_statistics = sum(buffer.numel() for buffer in _statistics_of(norms))
    # As many rows on every instance; those beyond the last micro-batch stay zero.
    found = torch.zeros(-(-count // group.count), num_statistics, dtype=torch.float64)
    with evaluation_mode(model), inside(_Alone()), feed as batches:
        for norm in norms:
            norm.train()
            norm.momentum = 1.0  # the running statistics become those of the micro-batch
        for number, batch in enumerate(batches):
            for buffer in _statistics_of(norms):
                buffer.zero_()
            for _ in parallelism.losses(model, training.task.workload, [batch], [size]):
                pass
            if norms:
                found[number] = torch.cat([buffer.flatten() for buffer in _statistics_of(norms)]).cpu()
    if norms and group.count > 1:
        # (instance, row, …) -> (row, instance, …): the order of the micro-batches
        found = group.gather(found).transpose(0, 1).reshape(-1, num_statistics)
    total = torch.zeros(num_statistics, dtype=torch.float64)
    for row in found[:count].unbind():
        total += row
    return total / count


def _statistics_of(norms: list[AnyBatchNorm]) -> list[Tensor]:
    return [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]


@contextmanager
def _micro_batches(training: Training, numbers: range, size: int, epoch: int) -> Iterator[Iterator[Batch]]:
    """Yield the micro-batches with these numbers, of `size` samples each, in the order of an epoch of the training."""
    source = training.task.train_source
    per_block = samples_per_block(source, size) // size

    def requests() -> Iterator[SampleRequest]:
        for first in range(0, len(numbers), per_block):
            starts = np.asarray(numbers[first : first + per_block], np.int64) * size
            positions = (starts[:, None] + np.arange(size)).reshape(-1)
            places = positions + epoch * training.task.lengths.updates_per_epoch * training.task.lengths.global_batch
            yield SampleRequest(order(training.recipe.seed, epoch, positions, len(source)), places, epoch)

    device = training.placement.device
    most = size * min(per_block, max(1, len(numbers)))
    with Feed(source, requests(), most, prefetch=1, device=device) as feed:
        yield (
            {name: rows[start : start + size] for name, rows in block.rows.items()}
            for block in feed
            for start in range(0, len(block.samples), size)
        )
