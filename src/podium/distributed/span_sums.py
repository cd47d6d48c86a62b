"""Sums of a few numbers over neighbouring instances of one host, in shared memory. Used by `lockstep.py`.

A layer that shares statistics between replicas needs one such sum in its forward pass and one in its backward pass, and
every instance waits for it. Each writes its numbers once and reads those of the others; a message would pass through
a socket and another thread on both sides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podium.distributed.instances import Instances
from podium.distributed.reduction.uneven_buffers import sum_of
from podium.distributed.shared_memory import SharedMemory
from podium.replica_tree import deal, join_order

#: of the numbers of one layer that are exchanged at a time
PIECE_BYTES = 1 << 16


class SpanSums:
    """Sums over aligned blocks of replicas that are dealt to the instances of one host."""

    def __init__(self, instances: Instances, num_replicas: int, shared: SharedMemory) -> None:
        self._index, self._shared = instances.index, shared
        self._blocks = deal(num_replicas, instances.count)
        #: by level of the tree: exchanges so far
        self._num_exchanges = [0] * _num_levels(num_replicas)

    @classmethod
    def open(cls, instances: Instances, num_replicas: int) -> "SpanSums | None":
        """Open memory for the sums. Collective. None on all instances where they do not share memory."""
        if len(instances.host_sizes) > 1:
            return None
        levels = _num_levels(num_replicas)
        sizes = [[(PIECE_BYTES, torch.uint8)] * (2 * levels)] * instances.count
        shared = SharedMemory.open(
            instances.gather,
            instances.index,
            range(instances.count),
            instances.members,
            instances.timeout_s,
            sizes,
            levels,
        )
        return None if shared is None else cls(instances, num_replicas, shared)

    def total(self, tensor: Tensor, num_in_block: int) -> Tensor:
        """Return the sum over the aligned block of `num_in_block` replicas around this instance's, with the same bits
        on all instances of the block."""
        start = self._blocks[self._index].start // num_in_block * num_in_block
        whole = range(start, start + num_in_block)
        inside = [index for index, block in enumerate(self._blocks) if block.start in whole]
        order = join_order([self._blocks[index] for index in inside], whole)
        flat = tensor.contiguous().view(-1)
        total = torch.empty_like(flat)
        size = PIECE_BYTES // flat.element_size()
        for at in range(0, len(flat), size):
            parts = self._exchange(flat[at : at + size], inside, num_in_block.bit_length() - 1)
            sum_of(parts, order, into=total[at : at + size])
        return total.view(tensor.shape)

    def _exchange(self, own: Tensor, inside: Sequence[int], level: int) -> list[Tensor]:
        """Return the numbers of all instances of a block, which may be read until the next exchange but one.

        Two buffers alternate, so one barrier is enough: an instance that reaches it has read what came before. Blocks
        of other sizes have other buffers, as some of their instances may be further behind.
        """
        buffer, num_bytes = 2 * level + self._num_exchanges[level] % 2, own.numel() * own.element_size()
        self._num_exchanges[level] += 1
        parts = [self._shared.flats[index][buffer][:num_bytes].view(own.dtype) for index in inside]
        parts[inside.index(self._index)].copy_(own)
        self._shared.barrier(level, [index for index in inside if index != self._index])
        return parts


def _num_levels(num_replicas: int) -> int:
    return num_replicas.bit_length()
