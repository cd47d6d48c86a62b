"""CUDA graphs (`engine.graph`): both passes of a micro-batch are captured once and then replayed as one launch, for
models so small that the host starts operators more slowly than the device runs them.

    the first micro-batch    runs a few times on a stream of its own, then once while its operators are captured
    every one                is copied into the memory that was captured; the replay leaves its loss and gradients in
                             memory that is as fixed, from where they are taken

Buffers change as without a graph. The optimiser's step stays outside, as its rate is a number on the host. Random
numbers would be those of the first micro-batch for ever, since capturing forbids to seed, so models that draw are
refused. This was never run on a CUDA device: tests run it with a stand-in that records operators and repeats them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss
from podium.errors import UserError
from podium.machine import foreach
from podium.machine.device import random_states
from podium.transforms.seeding import unseeded

#: passes before the capture, in which libraries choose their algorithms and take their memory
_WARM_UP = 3


class Capture(Protocol):
    """What captures operators on a kind of device."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run what will be captured, in the way in which it will be."""

    def capture(self, work: Callable[[], None]) -> None:
        """Run it and keep its operators."""

    def replay(self) -> None:
        """Run the kept operators on the same memory."""


class CudaCapture:
    """torch's CUDA graphs."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], None]) -> None:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()
        torch.cuda.current_stream().wait_stream(beside)

    def capture(self, work: Callable[[], None]) -> None:
        # The feed's thread goes on to wait for its copies, which capturing would otherwise forbid to every thread.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        self._graph.replay()


#: by kind of device
CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaCapture}


class PassGraph:
    """Both passes of a micro-batch, captured when the first one comes."""

    def __init__(
        self,
        device: torch.device,
        params: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        passes: Callable[[nn.Module, Batch], Loss],
    ) -> None:
        """Prepare to capture `passes`, which run forward and backward and leave gradients in `params`."""
        self._device, self._params, self._buffers, self._passes = device, params, list(buffers), passes
        self._capture = CAPTURES[device.type]()
        self._batch: dict[str, Tensor] = {}
        self._loss: Loss | None = None
        self._grads: list[tuple[nn.Parameter, Tensor]] = []

    def run(self, model: nn.Module, batch: Batch) -> Loss:
        """Run both passes; add to the gradients, and return the loss, which carries none."""
        if self._loss is None:
            self._make(model, batch)
        assert self._loss is not None
        foreach.copy_([self._batch[name] for name in self._batch], [batch[name] for name in self._batch])
        self._capture.replay()
        self._add_gradients()
        metrics = {name: (total.clone(), count) for name, (total, count) in self._loss.metrics.items()}
        return Loss(self._loss.sum.clone(), self._loss.count, metrics)

    def _make(self, model: nn.Module, batch: Batch) -> None:
        """Capture the passes; nothing of it is left in gradients and buffers."""
        self._batch = {name: tensor.clone() for name, tensor in batch.items()}
        before = [buffer.clone() for buffer in self._buffers]
        kept = [param.grad for param in self._params]
        found: list[Loss] = []

        def passes() -> None:
            for param in self._params:
                param.grad = None  # so that gradients get memory of the graph's own
            found[:] = [self._passes(model, self._batch)]

        with unseeded():
            states = random_states(self._device)
            for _ in range(_WARM_UP):
                self._capture.warm_up(passes)
            if any(not torch.equal(*pair) for pair in zip(states, random_states(self._device), strict=True)):
                raise UserError(
                    "engine.graph = true: the model draws random numbers in training, such as dropout, which a graph "
                    "would repeat in every update: set it to false, or the model's dropout to 0"
                )
            self._capture.capture(passes)
        loss = found[0]
        metrics = {name: (total.detach(), count) for name, (total, count) in loss.metrics.items()}
        self._loss = Loss(loss.sum.detach(), loss.count, metrics)
        self._grads = [(param, param.grad) for param in self._params if param.grad is not None]
        for param, grad in zip(self._params, kept, strict=True):
            param.grad = grad
        if before:
            foreach.copy_(self._buffers, before)

    def _add_gradients(self) -> None:
        """Add the captured gradients to those of the micro-batches before, or copy them out of the graph's memory."""
        first = [(param, grad) for param, grad in self._grads if param.grad is None]
        later = [(param.grad, grad) for param, grad in self._grads if param.grad is not None]
        if later:
            foreach.add_([total for total, _ in later], [grad for _, grad in later])
        if first:
            copies = [torch.empty_like(grad) for _, grad in first]
            foreach.copy_(copies, [grad for _, grad in first])
            for (param, _), copy in zip(first, copies, strict=True):
                param.grad = copy
