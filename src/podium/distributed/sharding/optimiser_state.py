"""`parallel.shard: optimiser`: every instance keeps the optimiser state of its own share of the parameters only.

    all instances have the sums of all gradients, and the same divisor (clipping needs the norm of all of them)
    each steps the parameters of its share, and of those that it holds a spare copy of
    and hands those of its share to the others, which have them from there unless they hold a copy

Each element is stepped once, from the same sum and by the same kernel as without sharding, so the bits are the same.
Shares consist of whole tensors, for optimisers that use norms of tensors (lars, lamb).

A spare copy (`launch.spare_copies`) needs no message: who holds one has the same gradients, and makes the same steps.

torch's ZeroRedundancyOptimizer wraps torch's own optimiser classes, which are not used here, and saves by pickle.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.distributed.instances import EXCHANGE_BYTES, Instances
from podium.distributed.lost import naming_lost_instance

#: parameters are broadcast in messages of up to this many bytes, which need as much extra memory
_MESSAGE_BYTES = 4 << 20


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Return which of `count` instances each item belongs to: the largest first, each to the instance with least."""
    totals = [0] * count
    owner = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owner[item] = min(range(count), key=lambda index: (totals[index], index))
        totals[owner[item]] += sizes[item]
    return owner


def copies_of(owner: int, num_spares: int, count: int) -> list[int]:
    """Return which of `count` instances hold the share of `owner`: itself, and those after it."""
    return [(owner + after) % count for after in range(min(1 + num_spares, count))]


class Shares:
    """Which instance steps which parameter; computed from names and sizes, so it is the same on all instances."""

    def __init__(self, params: Mapping[str, nn.Parameter], instances: Instances, num_spares: int = 0) -> None:
        self._instances = instances
        sizes = [param.numel() * param.element_size() for param in params.values()]
        owner = dict(zip(params, owners(sizes, instances.count), strict=True))
        holders = [copies_of(index, num_spares, instances.count) for index in range(instances.count)]
        #: names of the parameters that this instance steps: its share, and those that it holds a copy of
        self.held = {name for name, index in owner.items() if instances.index in holders[index]}
        #: the shares that this instance has to be told
        self._untold = [index for index in range(instances.count) if instances.index not in holders[index]]
        self._everyone_knows = num_spares >= instances.count - 1
        self._params: list[list[Tensor]] = [
            [param.detach() for name, param in params.items() if owner[name] == index]
            for index in range(instances.count)
        ]
        self._in_memory = instances.share_memory and instances.device.type == "cpu"
        self._rounds = _rounds(self._params) if self._in_memory else []

    def broadcast(self, waited: Callable[[float], None]) -> None:
        """Give the parameters of every share from its owner to those that did not step them. Collective."""
        if self._everyone_knows:
            return
        began = time.perf_counter()
        if self._in_memory:
            self._exchange()
        else:
            for index, params in enumerate(self._params):
                if params:
                    with naming_lost_instance(index):
                        dist._broadcast_coalesced(self._instances.group(), params, _MESSAGE_BYTES, index)
        waited(time.perf_counter() - began)

    def _exchange(self) -> None:
        for shares in self._rounds:
            lengths = [sum(map(len, parts)) for parts in shares]
            own = torch.empty(max(lengths) if lengths[self._instances.index] else 0, dtype=torch.uint8)
            if len(own):
                torch.cat(shares[self._instances.index], out=own[: lengths[self._instances.index]])
            for pieces, _ in self._instances.exchange(own, max(lengths)):
                for index in self._untold:
                    parts = pieces[index][: lengths[index]].split([len(part) for part in shares[index]])
                    for part, values in zip(shares[index], parts, strict=True):
                        part.copy_(values)


def _rounds(shares: Sequence[Sequence[Tensor]]) -> list[list[list[Tensor]]]:
    """Cut every share into pieces of EXCHANGE_BYTES; return, for each round, the bytes of the piece of each share."""
    cut = [_pieces([_bytes(tensor) for tensor in tensors]) for tensors in shares]
    return [list(parts) for parts in zip_longest(*cut, fillvalue=[])]


def _pieces(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    pieces: list[list[Tensor]] = []
    room = 0
    for flat in flats:
        while len(flat):
            if not room:
                pieces.append([])
                room = EXCHANGE_BYTES
            pieces[-1].append(flat[:room])
            room, flat = room - len(pieces[-1][-1]), flat[room:]
    return pieces


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of the bytes of a tensor without gaps, as they lie in memory."""
    strides = tensor.stride()
    axes = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -tensor.shape[axis]))
    return tensor.permute(axes).view(-1).view(torch.uint8)
