"""The outputs, costs and activation memory of a model's blocks, measured by running one micro-batch through them.

A pipeline needs them before it cuts the model: sender and receiver must know the tensors between devices, and all
devices should have the same amount of work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from podium.contract import Batch, Workload
from podium.errors import UserError
from podium.recipe.sections.precision import PrecisionSection
from podium.transforms.precision import autocast_blocks, cast_inputs
from podium.transforms.thread_budget import Products


@dataclass(frozen=True)
class TensorSpec:
    """The form of a tensor that is sent from one block to the next, for any number of samples.

    Messages are contiguous memory, so images in channels-last layout are sent with the channel dimension last.
    """

    shape: tuple[int, ...]  # of one sample, as it is sent
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, tensor: Tensor, num_samples: int) -> "TensorSpec":
        """Return the form of `tensor`, a block's output for `num_samples`; raise UserError unless it can be sent."""
        if tensor.dim() == 0 or len(tensor) != num_samples:
            raise UserError(
                f"a model can only be cut where every tensor has a row for each sample, but its blocks pass on one of "
                f"the shape {list(tensor.shape)}"
            )
        last = tensor.dim() > 3 and not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()
        sent = tensor.movedim(1, -1) if last else tensor
        return cls(tuple(sent.shape[1:]), tensor.dtype, last)

    def empty(self, num_samples: int, device: torch.device | str) -> Tensor:
        """Allocate memory for a message."""
        return torch.empty((num_samples, *self.shape), dtype=self.dtype, device=device)

    def to_message(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as it is sent."""
        return (tensor.movedim(1, -1) if self.channels_last else tensor).contiguous()

    def from_message(self, tensor: Tensor) -> Tensor:
        """Return a received `tensor` in the form that blocks expect."""
        return tensor.movedim(-1, 1) if self.channels_last else tensor


@dataclass(frozen=True)
class BlockFacts:
    """Outputs, cost and memory of one block for one micro-batch."""

    outputs: tuple[TensorSpec, ...]
    #: multiplications in layers with weights, in the forward pass
    products: int
    #: bytes kept for the backward pass, without weights
    activation_bytes: int


def probe_blocks(
    workload: Workload,
    blocks: Sequence[nn.Module],
    micro_batch: int,
    precision: PrecisionSection,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], list[BlockFacts]]:
    """Run one micro-batch forward in training mode; return (the inputs of the first block as meta tensors, the facts of
    all blocks).

    Buffers are restored afterwards.
    """
    batch = {name: tensor.to(device) for name, tensor in workload.example(micro_batch).items()}
    inputs = model_inputs(workload, batch, training=True)
    args: tuple[Any, ...] = cast_inputs(precision, inputs)
    buffers = [buffer for block in blocks for buffer in block.buffers()]
    before = [buffer.clone() for buffer in buffers]
    facts = []
    with autocast_blocks(precision, device):
        for block in blocks:
            saved = SavedBytes(block.parameters())
            with Products(block) as products, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                args = as_tuple(block(*args))
            outputs = tuple(TensorSpec.of(tensor, micro_batch) for tensor in args)
            facts.append(BlockFacts(outputs, products.count, saved.num_bytes))
            # Detached from the previous blocks, so that their saved tensors are freed.
            args = tuple(
                tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor.detach() for tensor in args
            )
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return tuple(torch.empty_like(tensor, device="meta") for tensor in inputs), facts


def model_inputs(workload: Workload, batch: Batch, *, training: bool) -> tuple[Tensor, ...]:
    """Return the arguments that a workload's loss calls its model with, which may be augmented first."""
    try:
        workload.loss(_InputRecorder(training), batch)
    except _Recorded as recorded:
        return recorded.inputs
    raise AssertionError("a workload's loss must call its model")


class _Recorded(BaseException):  # not an Exception, so that no workload catches it
    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _InputRecorder(nn.Module):
    """A stand-in for the model that records the arguments it is called with."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training

    def forward(self, *args: Tensor) -> None:
        raise _Recorded(args)


class FixedOutput(nn.Module):
    """A stand-in for the model that returns an output computed before."""

    def __init__(self, output: Any, *, training: bool) -> None:
        super().__init__()
        self._output = output
        self.training = training

    def forward(self, *args: Tensor) -> Any:
        return self._output


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class SavedBytes:
    """A count of the memory that autograd saves for the backward pass, each storage once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Begin to count; `known`: tensors that are not counted."""
        # By the storage, not its address: tensors without memory have none.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (known := StorageWeakRef(storage)) not in self._seen:
            self._seen.add(known)
            self.num_bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor
