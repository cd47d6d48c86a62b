"""Buffers that are summed over the instances: through shared memory between instances of one host, else by messages.

`ExactReduction` keeps its gradients in one of these. Instances of one host read each other's gradients in place:
5 ms of processor time beside the training where loopback sockets took 17 (two instances, 12 MB of gradients).

    a sum over four instances of one host, whose buffers are each divided into four slices:
        barrier; instance i adds slice i of all four in the tree's order, then slice i of the other hosts
        barrier; every instance copies the other slices from the instances that added them
        barrier; buffers may be changed again

Where instances or hosts are not all alike, `exchange.py` says who joins what.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from podium.distributed.instances import Instances
from podium.distributed.reduction.device_buffers import UnevenDeviceBuffers
from podium.distributed.reduction.exchange import Exchange
from podium.distributed.reduction.uneven_buffers import UnevenBuffers
from podium.distributed.shared_memory import SharedMemory, Size

#: number of threads that sum buffers at the same time, where threads do
LANES = 2
#: up to this size, every neighbour adds the whole buffer, which saves a barrier
WHOLE_BYTES = 1 << 17
#: size of the pieces that are added at a time, so that intermediate sums stay in the cache
PIECE_BYTES = 1 << 18


class Buffers(Protocol):
    """Flat tensors of this instance: the last subtree of its block of replicas before a sum, the total afterwards."""

    flats: list[Tensor]
    #: for each subtree of the block before the last one: tensors of the same sizes, which sums leave as they are
    complete: Sequence[list[Tensor]]

    def sum(self, number: int, lane: int) -> None:
        """Sum buffer `number` over all subtrees of all instances, in place; lanes are as in `Instances.sum_exact`."""
        ...

    def leave(self) -> None:
        """Take no further part: sums that wait, here and on other instances of this host, raise InstanceLost."""
        ...


def summed_buffers(
    instances: Instances, num_replicas: int, sizes: Sequence[Size], device: torch.device, num_lanes: int = LANES
) -> Buffers:
    """Create buffers of the given sizes, filled with zeros, for instances that replicas are dealt to. Collective: all
    instances get the same kind."""
    exchange = Exchange(num_replicas, instances.host_sizes)
    shared_memory = None
    if device.type == "cpu" and max(instances.host_sizes) > 1:
        neighbours = instances.neighbours
        sizes_of = [list(sizes) * len(exchange.subtrees[instance]) for instance in neighbours]
        shared_memory = SharedMemory.open(
            instances.gather, instances.index, neighbours, instances.members, instances.timeout_s, sizes_of, num_lanes
        )
    if shared_memory is None:
        exchange = Exchange(num_replicas, (1,) * instances.count)
    if not exchange.is_even and device.type != "cpu":
        return UnevenDeviceBuffers(instances, exchange, None, sizes, device)
    if not exchange.is_even:
        return UnevenBuffers(instances, exchange, shared_memory, sizes, device)
    return SentBuffers(instances, sizes, device) if shared_memory is None else SharedBuffers(instances, shared_memory)


class SentBuffers:
    """Buffers in private memory, summed by messages."""

    complete: Sequence[list[Tensor]] = ()

    def __init__(self, instances: Instances, sizes: Sequence[Size], device: torch.device) -> None:
        self._instances = instances
        if instances.count > 1:
            instances.group()  # now, as the first call is collective and later calls come from the lanes' threads
        self.flats = [torch.zeros(length, dtype=dtype, device=device) for length, dtype in sizes]

    def sum(self, number: int, lane: int) -> None:
        self._instances.sum_exact(self.flats[number], lane)

    def leave(self) -> None:
        pass


class SharedBuffers:
    """Buffers in memory that all instances of a host share."""

    complete: Sequence[list[Tensor]] = ()

    def __init__(self, instances: Instances, shared_memory: SharedMemory) -> None:
        self._instances, self._shared = instances, shared_memory
        self.flats = shared_memory.flats[shared_memory.own]

    def leave(self) -> None:
        self._shared.leave()

    def sum(self, number: int, lane: int) -> None:
        buffers = [flats[number] for flats in self._shared.flats]
        flat = self.flats[number]
        self._shared.barrier(lane)
        if flat.numel() * flat.element_size() <= WHOLE_BYTES:
            total = flat.clone()
            self._add(total, buffers, slice(None), lane)
            self._shared.barrier(lane)
            flat.copy_(total)
            return
        slices = _slices(flat.numel(), len(buffers))
        mine = slices[self._shared.own]
        self._add(flat[mine], buffers, mine, lane)
        self._shared.barrier(lane)
        for place in self._shared.others:
            flat[slices[place]].copy_(buffers[place][slices[place]])
        self._shared.barrier(lane)

    def _add(self, total: Tensor, buffers: list[Tensor], part: slice, lane: int) -> None:
        """Turn `total`, this neighbour's part, into the sum over all instances of all hosts."""
        parts = [buffer[part] for buffer in buffers]
        size = PIECE_BYTES // total.element_size()
        for start in range(0, total.numel(), size):
            piece = total[start : start + size]
            distance = 1
            while distance < len(parts):  # from this leaf of the tree up to its root (a + b = b + a)
                beside = (self._shared.own ^ distance) // distance * distance
                piece.add_(_tree_sum([other[start : start + size] for other in parts[beside : beside + distance]]))
                distance *= 2
        self._instances.sum_exact(total, lane, distance=len(parts))


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """Return the tree's sum of a power of two of parts; a single part is returned as it is."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _slices(length: int, count: int) -> list[slice]:
    step = -(-length // count // 16) * 16
    edges = [min(length, place * step) for place in range(count)] + [length]
    return [slice(start, stop) for start, stop in pairwise(edges)]
