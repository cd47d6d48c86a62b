"""Validation, test and prediction passes. Owns the `valid` section.

Sums and counts are collected per micro-batch and divided once, so the tail of a split counts for what it holds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor, nn

from podium.data.arrays import Source
from podium.data.feed import Feed, pass_blocks, samples_per_block
from podium.durations import Duration
from podium.engine.instances import Instances
from podium.engine.update import PendingLosses
from podium.schema import Section
from podium.workloads.base import Split, Workload

if TYPE_CHECKING:  # loads torch's compiler with torch's pipelines, which takes long
    from podium.engine.pipeline import Pipeline


class ValidSection(Section):
    """When and how to validate."""

    #: always after the last update too; 0 means only then
    every: Duration = Duration(1, "ep")
    #: samples in one forward pass
    micro: PositiveInt = 256
    #: use only the first so many
    max_samples: PositiveInt | None = None


def evaluate(
    model: nn.Module,
    workload: Workload,
    source: Source,
    *,
    micro_batch: int,
    device: torch.device,
    max_samples: int | None = None,
    instances: Instances | None = None,
    pipeline: "Pipeline | None" = None,
    peers: Instances | None = None,
) -> dict[str, float]:
    """Loss and metrics over a split, in evaluation mode; the model comes back in the mode it was in.

    With a `pipeline`, `peers` are those that carry the same stage of other replicas.

    Instances take the micro-batches in turn. Which samples share a micro-batch, and so every value that is added up,
    does not depend on how many instances there are.
    """
    instances = instances or Instances.alone()
    pending = PendingLosses()
    with _evaluation_mode(model):
        if pipeline is None:
            for batch in _micro_batches(source, micro_batch, device, max_samples, instances):
                pending.add(workload.loss(model, batch))
        else:
            peers = peers or Instances.alone()
            of_all = (source, micro_batch, device, max_samples, peers)
            if pipeline.has_losses:
                for loss in pipeline.losses(_micro_batches(*of_all)):
                    pending.add(loss)
            else:
                pipeline.carry(_sizes(*of_all))
    return pending.collect(instances).means()


class ModelOutputs:
    """Runs the model over a split for `predict`: (fields of the samples, outputs) as numpy arrays by name."""

    def __init__(self, model: nn.Module, workload: Workload, micro_batch: int, device: torch.device) -> None:
        self._model, self._workload = model, workload
        self._micro_batch, self._device = micro_batch, device

    def __call__(
        self, split: Split, max_samples: int | None = None, digest: Callable[[Any], Mapping[str, Tensor]] | None = None
    ) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        fields: dict[str, list[NDArray]] = {}
        outputs: dict[str, list[NDArray]] = {}
        source = self._workload.source(split)
        with _evaluation_mode(self._model):
            for batch in _micro_batches(source, self._micro_batch, self._device, max_samples, Instances.alone()):
                output = self._model(*self._workload.inputs(batch))
                for name, rows in (digest(output) if digest else {"output": output}).items():
                    outputs.setdefault(name, []).append(rows.cpu().numpy())
                for name, rows in batch.items():
                    fields.setdefault(name, []).append(rows.cpu().numpy().copy())  # the feed reuses its buffers
        return _joined(fields), _joined(outputs)


def _joined(parts: Mapping[str, list[NDArray]]) -> dict[str, NDArray]:
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _micro_batches(
    source: Source, micro_batch: int, device: torch.device, max_samples: int | None, instances: Instances
) -> Iterator[Mapping[str, Tensor]]:
    """This instance's micro-batches of a pass; all of them where it is alone."""
    num_samples = min(len(source), max_samples or len(source))
    block = samples_per_block(source, micro_batch)
    blocks = pass_blocks(num_samples, micro_batch, block // micro_batch, instances.index, instances.count)
    with Feed(source, blocks, min(block, num_samples), prefetch=1, device=device) as feed:
        for ready in feed:
            for start in range(0, len(ready.samples), micro_batch):
                yield {name: rows[start : start + micro_batch] for name, rows in ready.rows.items()}


def _sizes(
    source: Source, micro_batch: int, device: torch.device, max_samples: int | None, instances: Instances
) -> Iterator[int]:
    """How many samples each of `_micro_batches` has."""
    num_samples = min(len(source), max_samples or len(source))
    for block in pass_blocks(num_samples, micro_batch, 1, instances.index, instances.count):
        yield len(block.samples)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
