"""What the blocks of a model give to one another, cost and keep, found by running one micro-batch through them.

A pipeline needs it before it cuts: the tensors between devices have to be known on both sides, and devices are to have
equally much to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from podium.engine.busy import Products
from podium.engine.precision import PrecisionSection, computing, given
from podium.errors import UserError
from podium.workloads.base import Batch, Workload


@dataclass(frozen=True)
class Between:
    """A tensor that travels from one block to the next, for any number of samples.

    Messages are plain memory without gaps, so images whose channels are last in memory travel with that dimension last.
    """

    shape: tuple[int, ...]  # of one sample, as it travels
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, tensor: Tensor, num_samples: int) -> "Between":
        if tensor.dim() == 0 or len(tensor) != num_samples:
            raise UserError(
                f"a model can only be cut where every tensor has a row for each sample, but one of the shape "
                f"{list(tensor.shape)} goes between blocks"
            )
        last = tensor.dim() > 3 and not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()
        travels = tensor.movedim(1, -1) if last else tensor
        return cls(tuple(travels.shape[1:]), tensor.dtype, last)

    def empty(self, num_samples: int, device: torch.device | str) -> Tensor:
        """Memory for what travels."""
        return torch.empty((num_samples, *self.shape), dtype=self.dtype, device=device)

    def leaving(self, tensor: Tensor) -> Tensor:
        return (tensor.movedim(1, -1) if self.channels_last else tensor).contiguous()

    def arrived(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, 1) if self.channels_last else tensor


@dataclass(frozen=True)
class BlockFacts:
    """Of one block, at one micro-batch."""

    outputs: tuple[Between, ...]
    #: multiplications in layers with weights, forward
    products: int
    #: bytes that the backward pass needs, weights apart
    activation_bytes: int


def look_at_blocks(
    workload: Workload,
    blocks: Sequence[nn.Module],
    micro_batch: int,
    precision: PrecisionSection,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], list[BlockFacts]]:
    """(what goes into the first block, without memory; the facts): one micro-batch forward, in training mode.

    Buffers are as before afterwards.
    """
    batch = {name: tensor.to(device) for name, tensor in workload.example(micro_batch).items()}
    inputs = asked_inputs(workload, batch, training=True)
    args: tuple[Any, ...] = given(precision, inputs)
    buffers = [buffer for block in blocks for buffer in block.buffers()]
    before = [buffer.clone() for buffer in buffers]
    facts = []
    with computing(precision, device):
        for block in blocks:
            kept = _Kept(block)
            with Products(block) as products, torch.autograd.graph.saved_tensors_hooks(kept.take, kept.give):
                args = as_tuple(block(*args))
            outputs = tuple(Between.of(tensor, micro_batch) for tensor in args)
            facts.append(BlockFacts(outputs, products.count, kept.num_bytes))
            # Cut off from the blocks before: they may let go of what they keep.
            args = tuple(
                tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor.detach() for tensor in args
            )
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return tuple(torch.empty_like(tensor, device="meta") for tensor in inputs), facts


def asked_inputs(workload: Workload, batch: Batch, *, training: bool) -> tuple[Tensor, ...]:
    """What a workload's loss calls its model with; images may be varied before."""
    try:
        workload.loss(_Asking(training), batch)
    except _Asked as asked:
        return asked.inputs
    raise AssertionError("a workload's loss must call its model")


class _Asked(BaseException):  # not an Exception, so that no workload takes it for its own
    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _Asking(nn.Module):
    """Stands for the model, to see what it is called with."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training

    def forward(self, *args: Tensor) -> None:
        raise _Asked(args)


class Answer(nn.Module):
    """Stands for the model where its output is there already."""

    def __init__(self, output: Any, *, training: bool) -> None:
        super().__init__()
        self._output = output
        self.training = training

    def forward(self, *args: Tensor) -> Any:
        return self._output


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _Kept:
    """Counts the memory that autograd keeps, each piece once."""

    def __init__(self, block: nn.Module) -> None:
        self._seen = {param.untyped_storage().data_ptr() for param in block.parameters()}
        self.num_bytes = 0

    def take(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor

    def give(self, tensor: Tensor) -> Tensor:
        return tensor
