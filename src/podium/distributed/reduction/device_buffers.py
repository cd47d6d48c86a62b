"""Buffers on an accelerator that are summed over instances with blocks of replicas of different sizes.

The same sums as those of `uneven_buffers.py` without shared memory, in two batches of messages: a device's backend
begins a batch when the one before is complete, on both sides, so an instance must not send totals before it has sent
all that others need for theirs.
"""

from torch import Tensor

from podium.distributed.device_messages import Message
from podium.distributed.reduction.uneven_buffers import UnevenBuffers, sum_of


class UnevenDeviceBuffers(UnevenBuffers):
    """Buffers for each subtree of this instance's block, on its device; every instance is a host of its own."""

    def _join_slices(self, flat: Tensor, parts: list[Tensor], slices: list[slice], lane: int) -> None:
        own = slices[self._instances.index]
        others = [other for other in range(self._exchange.count) if other != self._host]
        sources = [host for host, _ in self._exchange.received(self._host)]
        length = own.stop - own.start
        received = self._buffer(flat, len(sources) * length, lane)[: len(sources) * length].split(max(1, length))
        sent: list[Message] = []
        for other in others:
            here = [part[slices[other]] for part in parts]
            sent += [(other, sum_of(here, order)) for order in self._sent_joins]
        self._exchange_batch(sent, list(zip(sources, received, strict=True)) if length else [])
        if length:
            self._write_total([*(part[own] for part in parts), *received], flat[own])
        totals = [(other, flat[slices[other]]) for other in others]
        self._exchange_batch([(other, flat[own]) for other in others], totals)

    def _exchange_batch(self, sent: list[Message], received: list[Message]) -> None:
        messages = self._instances.post(
            *([(other, tensor) for other, tensor in some if tensor.numel()] for some in (sent, received))
        )
        for message in messages:
            message.wait()  # the stream waits, not the host
