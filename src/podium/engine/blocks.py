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
from podium.workloads.base import Workload


@dataclass(frozen=True)
class Between:
    """A tensor that travels from one block to the next, for any number of samples."""

    shape: tuple[int, ...]  # of one sample
    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def of(cls, tensor: Tensor, num_samples: int) -> "Between":
        if tensor.dim() == 0 or len(tensor) != num_samples:
            raise UserError(
                f"a model can only be cut where every tensor has a row for each sample, but one of the shape "
                f"{list(tensor.shape)} goes between blocks"
            )
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = formats.get(tensor.dim(), torch.contiguous_format)
        own = last if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() else None
        return cls(tuple(tensor.shape[1:]), tensor.dtype, own or torch.contiguous_format)

    def empty(self, num_samples: int, device: torch.device | str) -> Tensor:
        shape = (num_samples, *self.shape)
        return torch.empty(shape, dtype=self.dtype, device=device, memory_format=self.memory_format)

    def fitted(self, tensor: Tensor) -> Tensor:
        """`tensor` laid out as the other side expects it: messages are plain memory."""
        return tensor.contiguous(memory_format=self.memory_format)


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
) -> list[BlockFacts]:
    """One micro-batch forward through the blocks, in training mode; buffers are as before afterwards."""
    batch = {name: tensor.to(device) for name, tensor in workload.example(micro_batch).items()}
    args: tuple[Any, ...] = given(precision, workload.inputs(batch))
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
    return facts


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
