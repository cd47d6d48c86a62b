"""Buffers that are summed over instances with blocks of replicas of different sizes, or on hosts with different numbers
of instances. `exchange.py` says who joins what; here are the memory, the messages and the additions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from podium.distributed.instances import FIRST_TAG, PIECE_BYTES, Instances
from podium.distributed.lost import naming_lost_instance
from podium.distributed.reduction.exchange import Exchange
from podium.distributed.shared_memory import SharedMemory, Size
from podium.replica_tree import Join

#: up to this size, every instance of a single host adds the whole buffer, which saves a barrier
WHOLE_BYTES = 1 << 17
#: size of the pieces that are added at a time: intermediate sums stay in the cache, and calls cost little
_ADDED_BYTES = 1 << 19

#: messages: the other instance, what is sent or received (which must live as long), and what to wait for
_Posted = list[tuple[int, Tensor, dist.Work]]


class Set(NamedTuple):
    """A set of flat tensors: this instance's last subtree of its block of replicas before sums, and the totals after
    them, which may be the same tensors."""

    flats: list[Tensor]
    totals: list[Tensor]


class UnevenBuffers:
    """Buffers for each subtree of this instance's block, in shared memory where there is any."""

    def __init__(
        self,
        instances: Instances,
        exchange: Exchange,
        shared_memory: SharedMemory | None,
        sizes: Sequence[Size],
        device: torch.device,
    ) -> None:
        self._instances, self._exchange, self._shared = instances, exchange, shared_memory
        self._host = exchange.host_of(instances.index)
        on_host = exchange.hosts[self._host]
        if len(exchange.hosts) > 1:
            instances.group()  # now, as the first call is collective and later calls come from the lanes' threads
        if shared_memory is None:
            own = exchange.subtrees[instances.index]
            flats = [[torch.zeros(length, dtype=dtype, device=device) for _ in own for length, dtype in sizes]]
        else:
            flats = shared_memory.flats
        # The first buffers of an instance are those of its last subtree.
        by_instance = [_in_order(of_one, len(sizes)) for of_one in flats]
        own_flats = by_instance[instances.index - on_host.start]
        self.flats: list[Tensor] = own_flats[-1]
        self.sets = [Set(self.flats, self.flats)]
        self.complete: Sequence[list[Tensor]] = own_flats[:-1]
        #: of each instance of this host, the buffers that hold totals after a sum
        self._totals = [subtrees[-1] for subtrees in by_instance]
        #: the buffers of all subtrees on this host, in order of the replicas
        self._on_host = [subtree for subtrees in by_instance for subtree in subtrees]
        self._total_join = exchange.total_join(self._host)
        self._sent_joins = [exchange.sent_join(self._host, subtree) for subtree in exchange.of_host(self._host)]
        self._received: dict[tuple[torch.dtype, int], Tensor] = {}

    def leave(self) -> None:
        if self._shared is not None:
            self._shared.leave()

    def sum(self, number: int, lane: int) -> None:
        flat, parts = self.flats[number], [subtree[number] for subtree in self._on_host]
        self._barrier(lane)
        if len(self._exchange.hosts) == 1 and flat.numel() * flat.element_size() <= WHOLE_BYTES:
            total = torch.empty_like(flat)
            _write_sum(parts, self._total_join, total)
            self._barrier(lane)
            flat.copy_(total)
            return
        slices = self._exchange.slices(flat.numel())
        self._join_slices(flat, parts, slices, lane)
        self._barrier(lane)
        first = self._exchange.hosts[self._host].start
        for owner, owned in enumerate(slices):
            holder = self._exchange.holder(self._host, owner)
            if holder != self._instances.index:
                flat[owned].copy_(self._totals[holder - first][number][owned])
        self._barrier(lane)

    def _join_slices(self, flat: Tensor, parts: list[Tensor], slices: list[slice], lane: int) -> None:
        """Leave the total of the slice that this instance owns in `flat`, and of those that it is the helper for.

        Between two instances, messages of subtrees come before those of totals, both in the order of the buffer.
        """
        index, size = self._instances.index, PIECE_BYTES // flat.element_size()
        own_pieces = _pieces(slices[index], size)
        incoming = self._post_receives(flat, own_pieces, lane)
        posted: _Posted = []
        others = [owner for owner in range(self._exchange.count) if owner not in self._exchange.hosts[self._host]]
        helped = [owner for owner in others if self._exchange.helper(self._host, owner) == index]
        for owner in helped:
            for piece in _pieces(slices[owner], size):
                here = [part[piece] for part in parts]
                posted += [self._send(sum_of(here, order), owner, lane) for order in self._sent_joins]
        for owner in helped:
            posted += [self._receive(flat[piece], owner, lane) for piece in _pieces(slices[owner], size)]
        for piece, (received, messages) in zip(own_pieces, incoming, strict=True):
            self._wait(messages)
            self._write_total([*(part[piece] for part in parts), *received], flat[piece])
            for host in range(len(self._exchange.hosts)):
                if host != self._host:
                    helper = self._exchange.helper(host, index)
                    posted.append(self._send(flat[piece], helper, lane))
        self._wait(posted)

    def _write_total(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """Write the sum of all subtrees of a slice: those on this host, then what is received."""
        _write_sum(parts, self._total_join, into)

    def _post_receives(self, flat: Tensor, pieces: list[slice], lane: int) -> list[tuple[list[Tensor], _Posted]]:
        """Post the messages in which other hosts send their subtrees of the pieces that this instance owns."""
        sources = [
            self._exchange.helper(host, self._instances.index) for host, _ in self._exchange.received(self._host)
        ]
        buffer = self._buffer(flat, len(sources) * sum(piece.stop - piece.start for piece in pieces), lane)
        start, found = 0, []
        for piece in pieces:
            received: list[Tensor] = []
            messages: _Posted = []
            for source in sources:
                received.append(buffer[start : start + piece.stop - piece.start])
                messages.append(self._receive(received[-1], source, lane))
                start += piece.stop - piece.start
            found.append((received, messages))
        return found

    def _buffer(self, flat: Tensor, length: int, lane: int) -> Tensor:
        """Return the lane's memory for what is received, grown as needed."""
        buffer = self._received.get((flat.dtype, lane))
        if buffer is None or buffer.numel() < length:
            buffer = self._received[flat.dtype, lane] = torch.empty(length, dtype=flat.dtype, device=flat.device)
        return buffer

    def _send(self, values: Tensor, to: int, lane: int) -> tuple[int, Tensor, dist.Work]:
        with naming_lost_instance(self._instances.members[to]):
            return to, values, self._instances.group().send([values], to, FIRST_TAG + lane)

    def _receive(self, values: Tensor, source: int, lane: int) -> tuple[int, Tensor, dist.Work]:
        with naming_lost_instance(self._instances.members[source]):
            return source, values, self._instances.group().recv([values], source, FIRST_TAG + lane)

    def _wait(self, posted: _Posted) -> None:
        for other, _, message in posted:
            with naming_lost_instance(self._instances.members[other]):
                self._instances.wait_for([message])

    def _barrier(self, lane: int) -> None:
        if self._shared is not None:
            self._shared.barrier(lane)


def _in_order(flats: list[Tensor], num_buffers: int) -> list[list[Tensor]]:
    """Return the buffers of an instance by subtree, of which those of the last come first in memory."""
    by_subtree = [flats[start : start + num_buffers] for start in range(0, len(flats), num_buffers)]
    return [*by_subtree[1:], by_subtree[0]]


def _pieces(part: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, part.stop)) for start in range(part.start, part.stop, size)]


def _write_sum(parts: Sequence[Tensor], order: Join, into: Tensor) -> None:
    """Write the sum of `parts`, joined in that order, to `into`, which may be one of them."""
    size = _ADDED_BYTES // into.element_size()
    for start in range(0, into.numel(), size):
        sum_of([part[start : start + size] for part in parts], order, into[start : start + size])


def sum_of(parts: Sequence[Tensor], order: Join, into: Tensor | None = None) -> Tensor:
    """Return the sum of `parts`, joined in that order: in `into`, else in new memory unless it is one of them."""
    if isinstance(order, int):
        return parts[order] if into is None else into.copy_(parts[order])
    left, right = (sum_of(parts, side) for side in order)
    if into is None:  # sums of sums are formed in place
        into = left if isinstance(order[0], tuple) else right if isinstance(order[1], tuple) else torch.empty_like(left)
    return torch.add(left, right, out=into)
