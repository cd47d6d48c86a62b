"""Validation, test and prediction passes.

Sums and counts are collected per micro-batch and divided once, so a smaller last micro-batch has the correct weight.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.contract import Split, Workload
from podium.data.feed import Feed, buffer_bytes
from podium.data.sample_plan import pass_blocks, samples_per_block
from podium.data.source import Source
from podium.distributed.instances import Instances
from podium.engine.losses import PendingLosses
from podium.engine.parallelism import Parallelism, Replicated

#: blocks that wait while one is used
_PREFETCH = 1


def evaluate(
    model: nn.Module,
    workload: Workload,
    source: Source,
    *,
    micro_batch: int,
    device: torch.device,
    max_samples: int | None = None,
    parallelism: Parallelism | None = None,
    together: bool = True,
) -> dict[str, float]:
    """Return loss and metrics over a split, in evaluation mode; the model's mode is restored afterwards.

    `parallelism`: that of a run, whose instances share the work by taking micro-batches in turn; unless `together`,
    this instance does all of it. Which samples share a micro-batch, and so every value that is added, does not depend
    on the number of instances. `max_samples`: no more than these, evenly spread over the split.
    """
    alone = Instances.alone()
    parallelism = parallelism or Replicated(model, alone)
    group, instances = (parallelism.data_group, parallelism.instances) if together else (alone, alone)
    work = (source, micro_batch, device, max_samples, group)
    pending = PendingLosses()
    with evaluation_mode(model):
        for loss in parallelism.losses(model, workload, _micro_batches(*work, spread=True), _sizes(*work)):
            pending.add(loss)
            del loss  # not while the next pass runs: see PendingLosses
    return pending.collect(instances).means()


class ModelOutputs:
    """A callable for `predict` that runs the model over a split and returns (fields of the samples, outputs) as numpy
    arrays by name."""

    def __init__(self, model: nn.Module, workload: Workload, micro_batch: int, device: torch.device) -> None:
        self._model, self._workload = model, workload
        self._micro_batch, self._device = micro_batch, device

    def __call__(
        self, split: Split, max_samples: int | None = None, digest: Callable[[Any], Mapping[str, Tensor]] | None = None
    ) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        fields: dict[str, NDArray] = {}
        outputs: dict[str, list[NDArray]] = {}
        source = self._workload.source(split)
        num_samples, done = min(len(source), max_samples or len(source)), 0
        with evaluation_mode(self._model):
            for batch in _micro_batches(source, self._micro_batch, self._device, max_samples, Instances.alone()):
                output = self._model(*self._workload.inputs(batch))
                for name, rows in (digest(output) if digest else {"output": output}).items():
                    outputs.setdefault(name, []).append(rows.cpu().numpy())
                for name, rows in batch.items():
                    values = rows.cpu().numpy()  # of the feed, which reuses its buffers
                    if name not in fields:
                        fields[name] = np.empty((num_samples, *values.shape[1:]), values.dtype)
                    fields[name][done : done + len(values)] = values
                done += len(rows)
        return fields, _joined(outputs)


def _joined(parts: Mapping[str, list[NDArray]]) -> dict[str, NDArray]:
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _micro_batches(
    source: Source,
    micro_batch: int,
    device: torch.device,
    max_samples: int | None,
    instances: Instances,
    *,
    spread: bool = False,
) -> Iterator[Mapping[str, Tensor]]:
    """Yield this instance's micro-batches of a pass over the source; where limited, over the first samples or, with
    `spread`, over evenly spread ones."""
    num_samples = min(len(source), max_samples or len(source))
    block = samples_per_block(source, micro_batch)
    blocks = pass_blocks(
        num_samples,
        micro_batch,
        block // micro_batch,
        instances.index,
        instances.count,
        spread_over=len(source) if spread else None,
    )
    with Feed(source, blocks, min(block, num_samples), prefetch=_PREFETCH, device=device) as feed:
        for ready in feed:
            for start in range(0, len(ready.samples), micro_batch):
                yield {name: rows[start : start + micro_batch] for name, rows in ready.rows.items()}


def _sizes(
    source: Source, micro_batch: int, device: torch.device, max_samples: int | None, instances: Instances
) -> Iterator[int]:
    """Yield the number of samples in each of `_micro_batches`."""
    num_samples = min(len(source), max_samples or len(source))
    for block in pass_blocks(num_samples, micro_batch, 1, instances.index, instances.count):
        yield len(block.samples)


def evaluation_feed_bytes(source: Source, micro_batch: int, max_samples: int | None, num_instances: int) -> int:
    """Return the memory that the feed of a pass over the source takes in one of the instances that share it."""
    num_samples, block = min(len(source), max_samples or len(source)), samples_per_block(source, micro_batch)
    num_blocks = -(-num_samples // (block * num_instances))
    return buffer_bytes(source, min(block, num_samples), _PREFETCH, num_blocks)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, without gradients, inside the `with` block."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
