"""Buffers that are summed over the instances: through shared memory between instances of one host, else by messages.

`ExactReduction` keeps its gradients in one of these. Instances of one host read each other's gradients in place:
5 ms of processor time beside the training where loopback sockets took 17 (two instances, 12 MB of gradients).

    a sum over four instances of one host, whose buffers are each divided into four slices:
        barrier; instance i adds slice i of all four in the tree's order, then slice i of the other hosts
        barrier; every instance copies the other slices from the instances that added them
        barrier; buffers may be changed again

Small models have two sets of buffers that are filled in turn, and totals in private memory: whoever fills a set again
has met the others once since they read it, which saves the last barrier. Short buffers are added whole by every
instance, which then meet once.

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
from podium.distributed.reduction.uneven_buffers import Set, UnevenBuffers
from podium.distributed.shared_memory import SharedMemory, Size

#: number of threads that sum buffers at the same time, where threads do
LANES = 2
#: up to this size, every neighbour adds the whole buffer, which saves a barrier
WHOLE_BYTES = 1 << 17
#: where there are two sets, how many bytes more than the slices each neighbour may read for that
MORE_BYTES = 1 << 20
#: up to this size of all buffers together there are two sets of them
TURNS_BYTES = 16 << 20
#: size of the pieces that are added at a time, so that intermediate sums stay in the cache
PIECE_BYTES = 1 << 18


class Buffers(Protocol):
    """Sets of flat tensors of this instance."""

    #: the sets that are to be filled in turn: the first one before the first sums
    sets: list[Set]
    #: for each subtree of the block before the last one: tensors of the same sizes, which sums leave as they are
    complete: Sequence[list[Tensor]]

    def sum(self, number: int, lane: int) -> None:
        """Sum buffer `number` of its next set over all subtrees of all instances; lanes are as in
        `Instances.sum_exact`."""
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
        num_sets = 2 if exchange.is_even and _num_bytes(sizes) <= TURNS_BYTES else 1
        sizes_of = [list(sizes) * num_sets * len(exchange.subtrees[instance]) for instance in neighbours]
        shared_memory = SharedMemory.open(
            instances.gather, instances.index, neighbours, instances.members, instances.timeout_s, sizes_of, num_lanes
        )
    if shared_memory is None:
        exchange = Exchange(num_replicas, (1,) * instances.count)
    if not exchange.is_even and device.type != "cpu":
        return UnevenDeviceBuffers(instances, exchange, None, sizes, device)
    if not exchange.is_even:
        return UnevenBuffers(instances, exchange, shared_memory, sizes, device)
    if shared_memory is None:
        return SentBuffers(instances, sizes, device)
    return SharedBuffers(instances, shared_memory, len(sizes))


def _num_bytes(sizes: Sequence[Size]) -> int:
    return sum(length * dtype.itemsize for length, dtype in sizes)


class SentBuffers:
    """Buffers in private memory, summed by messages."""

    complete: Sequence[list[Tensor]] = ()

    def __init__(self, instances: Instances, sizes: Sequence[Size], device: torch.device) -> None:
        self._instances = instances
        if instances.count > 1:
            instances.group()  # now, as the first call is collective and later calls come from the lanes' threads
        flats = [torch.zeros(length, dtype=dtype, device=device) for length, dtype in sizes]
        self.sets = [Set(flats, flats)]

    def sum(self, number: int, lane: int) -> None:
        self._instances.sum_exact(self.sets[0].flats[number], lane)

    def leave(self) -> None:
        pass


class SharedBuffers:
    """Buffers in memory that all instances of a host share."""

    complete: Sequence[list[Tensor]] = ()

    def __init__(self, instances: Instances, shared_memory: SharedMemory, num_buffers: int) -> None:
        self._instances, self._shared = instances, shared_memory
        #: by set: the buffers of each neighbour
        self._by_set = [
            [flats[first : first + num_buffers] for flats in shared_memory.flats]
            for first in range(0, len(shared_memory.flats[0]), num_buffers)
        ]
        own = [flats[shared_memory.own] for flats in self._by_set]
        totals = None if len(own) == 1 else [torch.zeros_like(flat) for flat in own[0]]
        self.sets = [Set(flats, totals or flats) for flats in own]
        #: by buffer: the set that its next sum takes
        self._next_set = [0] * num_buffers

    def leave(self) -> None:
        self._shared.leave()

    def sum(self, number: int, lane: int) -> None:
        place = self._next_set[number]
        self._next_set[number] = (place + 1) % len(self.sets)
        buffers, total = [flats[number] for flats in self._by_set[place]], self.sets[place].totals[number]
        num_bytes = total.numel() * total.element_size()
        self._shared.barrier(lane)
        if len(self.sets) > 1 and num_bytes * (len(buffers) - 2) <= MORE_BYTES:
            self._add(total, buffers, slice(None), lane)
        elif len(self.sets) == 1 and num_bytes <= WHOLE_BYTES:
            total = torch.empty_like(total)
            self._add(total, buffers, slice(None), lane)
            self._shared.barrier(lane)
            buffers[self._shared.own].copy_(total)
        else:
            self._add_slices(buffers, total, lane)

    def _add_slices(self, buffers: list[Tensor], total: Tensor, lane: int) -> None:
        """Add one slice, and take the others from those that add them."""
        own = self._shared.own
        slices, flat = _slices(total.numel(), len(buffers)), buffers[own]
        self._add(flat[slices[own]], buffers, slices[own], lane)
        self._shared.barrier(lane)
        for place, part in enumerate(slices):
            if place != own or total is not flat:
                total[part].copy_(buffers[place][part])
        if total is flat:
            self._shared.barrier(lane)

    def _add(self, total: Tensor, buffers: list[Tensor], part: slice, lane: int) -> None:
        """Write the sum over all instances of all hosts to `total`, which may be this neighbour's part itself."""
        parts = [buffer[part] for buffer in buffers]
        size, own = PIECE_BYTES // total.element_size(), self._shared.own
        for start in range(0, total.numel(), size):
            pieces = [other[start : start + size] for other in parts]
            piece, below = total[start : start + size], pieces[own]
            distance = 1
            while distance < len(parts):  # from this leaf of the tree up to its root (a + b = b + a)
                beside = (own ^ distance) // distance * distance
                below = torch.add(below, _tree_sum(pieces[beside : beside + distance]), out=piece)
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
