"""Buffers that are summed over the instances: in memory that the instances of one host share, else by messages.

`Buckets` keeps its gradients in one of these. Where instances share a host they read each other's gradients where they
lie: 5 ms of processor time beside the training where loopback sockets took 17 (two instances, 12 MB of gradients).

    a sum, where four mates (instances of a host) have a buffer each of four slices:
        meet; mate i adds slice i of all mates, in the tree's order, and joins it with slice i of the other hosts
        meet; everyone copies the other slices from those who added them
        meet; buffers may be changed again
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from podium.engine.instances import Instances
from podium.engine.mates import Mates, Size

#: up to this every mate adds the whole buffer: a meeting fewer
_WHOLE_BYTES = 1 << 17
#: pieces that are added at a time, so that what is in between stays in the cache
_PIECE_BYTES = 1 << 18


class Buffers(Protocol):
    """Flat tensors of this instance, of the same sizes on all of them."""

    flats: list[Tensor]

    def sum(self, number: int, lane: int) -> None:
        """Sums buffer `number` over the instances, in place; lanes are as in `Instances.sum_exact`."""
        ...


def summed_buffers(instances: Instances, sizes: Sequence[Size], device: torch.device, num_lanes: int) -> Buffers:
    """Collective: all instances call it together, and all get the same kind. Buffers begin as zeros."""
    mates = None
    if device.type == "cpu":
        names, count = instances.members, instances.num_mates
        mates = Mates.open(instances.gather, instances.index, count, names, instances.timeout_s, sizes, num_lanes)
    return SentBuffers(instances, sizes, device) if mates is None else SharedBuffers(instances, mates)


class SentBuffers:
    """Memory of this process alone; sums travel as messages."""

    def __init__(self, instances: Instances, sizes: Sequence[Size], device: torch.device) -> None:
        self._instances = instances
        if instances.count > 1:
            instances.group()  # here, where all are: the first time is collective, and lanes are threads
        self.flats = [torch.zeros(length, dtype=dtype, device=device) for length, dtype in sizes]

    def sum(self, number: int, lane: int) -> None:
        self._instances.sum_exact(self.flats[number], lane)


class SharedBuffers:
    """Memory that all instances of a host see."""

    def __init__(self, instances: Instances, mates: Mates) -> None:
        self._instances, self._mates = instances, mates
        self.flats = mates.flats[mates.own]

    def sum(self, number: int, lane: int) -> None:
        buffers = [flats[number] for flats in self._mates.flats]
        flat = self.flats[number]
        self._mates.meet(lane)
        if flat.numel() * flat.element_size() <= _WHOLE_BYTES:
            total = flat.clone()
            self._add(total, buffers, slice(None), lane)
            self._mates.meet(lane)
            flat.copy_(total)
            return
        slices = _slices(flat.numel(), len(buffers))
        mine = slices[self._mates.own]
        self._add(flat[mine], buffers, mine, lane)
        self._mates.meet(lane)
        for place in self._mates.others:
            flat[slices[place]].copy_(buffers[place][slices[place]])
        self._mates.meet(lane)

    def _add(self, total: Tensor, buffers: list[Tensor], part: slice, lane: int) -> None:
        """total, which is this mate's part, becomes the sum of all mates' and all hosts'."""
        parts = [buffer[part] for buffer in buffers]
        size = _PIECE_BYTES // total.element_size()
        for start in range(0, total.numel(), size):
            piece = total[start : start + size]
            distance = 1
            while distance < len(parts):  # from this leaf of the tree up to its root (a + b = b + a)
                beside = (self._mates.own ^ distance) // distance * distance
                piece.add_(_tree_sum([other[start : start + size] for other in parts[beside : beside + distance]]))
                distance *= 2
        self._instances.sum_exact(total, lane, distance=len(parts))


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """The sum of a power of two of parts over the tree; the part itself where there is one."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _slices(length: int, count: int) -> list[slice]:
    step = -(-length // count // 16) * 16
    edges = [min(length, place * step) for place in range(count)] + [length]
    return [slice(start, stop) for start, stop in pairwise(edges)]
