"""The replicas of this instance in one update: their samples, their random numbers, their forward and backward passes.

`update.py` begins an update; a form of `parallelism.py` decides in which order the passes run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Workload
from podium.distributed.reduction.tree import Tensors
from podium.engine.graph import PassGraph
from podium.engine.loss_scale import LossScale
from podium.engine.losses import PendingLosses
from podium.engine.replay import Replay
from podium.layers.loss import scaled
from podium.machine import foreach
from podium.transforms.seeding import MicroBatch, enter_micro_batch

#: gives a context around a part of an update, by its name
Span = Callable[[str], AbstractContextManager]
NO_SPAN = nullcontext()


class LocalReplicas:
    """The replicas `numbers` of the run, each with `num_micro_batches` micro-batches per update.

    Slots number the local ones from 0. Every replica starts an update from the same buffers.
    """

    def __init__(
        self,
        workload: Workload,
        numbers: range,
        num_micro_batches: int,
        seed: int,
        buffers: Sequence[Tensor],
        device: torch.device,
        loss_scale: LossScale,
        span: Span = lambda name: NO_SPAN,
        *,
        is_alone: bool = True,
    ) -> None:
        """Prepare the passes; `is_alone`: whether this instance carries all replicas."""
        self._workload, self.numbers, self._seed = workload, numbers, seed
        self._buffers, self._device, self._loss_scale, self._span = list(buffers), device, loss_scale, span
        self.num, self.num_micro_batches = len(numbers), num_micro_batches
        self._keeps_buffers = self.num > 1 or not is_alone
        #: losses that the host has not read yet
        self.pending = PendingLosses()
        #: items of the losses of this update, so far
        self.count = 0
        #: the buffers at the start of this update, if there are several replicas
        self.start_buffers: list[Tensor] = []
        #: the number of this update
        self.update, self._samples = 0, dict[str, Tensor]()
        #: runs the passes of models that are small enough, where nothing looks at them
        self.replay: Replay | None = None
        #: runs both passes at once, where they are captured
        self.graph: PassGraph | None = None
        #: slot and micro-batch of the pass that runs
        self.running = (0, 0)

    def alone(self, number: int) -> "LocalReplicas":
        """Return one replica of the run, whether it is among these or not, with pending losses of its own."""
        one = range(number, number + 1)
        state = (self._seed, self._buffers, self._device, self._loss_scale, self._span)
        return LocalReplicas(self._workload, one, self.num_micro_batches, *state)

    def begin(self, update: int, samples: Mapping[str, Tensor]) -> None:
        """Begin update number `update`; `samples`: (local replicas, accumulation, micro-batch, …), or empty where
        another device of the pipeline has them."""
        self.update, self._samples, self.count = update, dict(samples), 0
        self.start_buffers = [buffer.clone() for buffer in self._buffers] if self._keeps_buffers else []
        if self.replay is not None:
            self.replay.begin(update)

    def reset_buffers(self) -> None:
        """Reset the buffers to those that the first replica started from."""
        if self.start_buffers:
            foreach.copy_(self._buffers, self.start_buffers)

    def batches(self, slot: int) -> list[Batch]:
        """Return the micro-batches of a replica."""
        num = self.num_micro_batches if self._samples else 0
        return [{name: rows[slot, index] for name, rows in self._samples.items()} for index in range(num)]

    def enter(self, slot: int, index: int) -> None:
        """Seed torch for a micro-batch, whose random numbers depend only on its update, replica and index."""
        enter_micro_batch(self._device, self._seed, MicroBatch(self.update, self.numbers[slot], index))

    def forward(self, model: nn.Module, slot: int, index: int) -> Loss:
        """Run the forward pass of a micro-batch."""
        self.running = (slot, index)
        self.enter(slot, index)
        samples = {name: rows[slot, index] for name, rows in self._samples.items()}
        with self._span("forward"):
            if self.graph is not None:
                return self.graph.run(model, samples)
            if self.replay is not None and self.scale == 1:
                return self.replay.forward(model, samples, partial(self.enter, slot, index))
            return self._workload.loss(model, samples)

    def both_passes(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward and the backward pass of a micro-batch, to be captured."""
        loss = self._workload.loss(model, batch)
        self._backward(loss)
        return loss

    def backward(self, loss: Loss) -> None:
        """Run the backward pass from the loss *sum*, times the loss scale."""
        if self.graph is None:  # otherwise `forward` has run both
            with self._span("backward"):
                self._backward(loss)

    def _backward(self, loss: Loss) -> None:
        if self.replay is not None and self.scale == 1:
            self.replay.backward(loss)
        else:
            scaled(loss.sum, self.scale).backward()

    @property
    def scale(self) -> Tensor | float:
        """The factor on the loss in this update."""
        return self._loss_scale.factor

    def owned(self, tensors: Tensors) -> Tensors:
        """Return the tensors that a replica leaves to be added to, in memory that no later pass overwrites."""
        if self.replay is None or not self.replay.overwrites:
            return tensors
        return [None if tensor is None else tensor.clone() for tensor in tensors]

    def add(self, loss: Loss) -> None:
        """Add a loss to the pending ones, without waiting for the device."""
        self.pending.add(loss)
        self.count += loss.count
