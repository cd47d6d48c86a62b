"""Who carries out the sums of buckets while the backward pass still runs: threads on a CPU, a stream on an accelerator.

Nothing here refers to an `ExactReduction`, so that it is freed, and its threads end, with the engine that made it.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

import torch

from podium.distributed.reduction.summed_buffers import LANES, Buffers
from podium.machine.threads import stay_single


class Carrier(Protocol):
    """Sums buckets in the background, in the order in which they are put."""

    def put(self, number: int) -> None:
        """Begin the sum of a bucket whose local sums are complete."""
        ...

    def wait(self) -> float | None:
        """Return when all buckets are summed: how many seconds their sums took, if that is known."""
        ...

    def close(self) -> None: ...


class Threads:
    """Threads that sum buckets in turn, so that one waits for messages while the other adds."""

    def __init__(self, summed: Buffers, num_buckets: int) -> None:
        self._to_send: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in range(min(LANES, num_buckets))]
        self._done: SimpleQueue[BaseException | float] = SimpleQueue()
        self._num_put = 0
        for lane, to_send in enumerate(self._to_send):
            args = (summed, lane, to_send, self._done)
            threading.Thread(target=_sum_buckets, args=args, name=f"gradients-{lane}", daemon=True).start()

    def put(self, number: int) -> None:
        self._num_put += 1
        self._to_send[number % LANES].put(number)

    def wait(self) -> float:
        took, num_put, self._num_put = 0.0, self._num_put, 0
        for _ in range(num_put):
            done = self._done.get()
            if isinstance(done, BaseException):
                raise done
            took += done
        return took

    def close(self) -> None:
        for to_send in self._to_send:
            to_send.put(None)


def _sum_buckets(
    summed: Buffers,
    lane: int,
    to_send: "SimpleQueue[int | None]",
    done: "SimpleQueue[BaseException | float]",
) -> None:
    """Sum one bucket after the other, in a thread, and tell how long each took; end at None or at the first error."""
    stay_single()
    while (number := to_send.get()) is not None:
        began = time.perf_counter()
        try:
            summed.sum(number, lane)
        except BaseException as error:
            done.put(error)
            return
        done.put(time.perf_counter() - began)


class AtEnd:
    """The calling thread, once it has nothing else to do: for a single bucket, which is complete when the backward pass
    is, a thread would only have to be woken."""

    def __init__(self, summed: Buffers) -> None:
        self._summed, self._put = summed, list[int]()

    def put(self, number: int) -> None:
        self._put.append(number)

    def wait(self) -> float:
        began = time.perf_counter()
        while self._put:
            self._summed.sum(self._put.pop(0), 0)
        return time.perf_counter() - began

    def close(self) -> None:
        self._put.clear()


class SideStream:
    """A stream of the device beside that of the passes. The host only puts messages and additions in line, so it needs
    no thread and waits for nothing."""

    def __init__(self, summed: Buffers, device: torch.device) -> None:
        self._summed, self._device = summed, device
        self._stream = torch.Stream(device)

    def put(self, number: int) -> None:
        # An event between the streams: the local sums are complete before they are sent.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            self._summed.sum(number, 0)

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        pass


def carrier_for(summed: Buffers, num_buckets: int, device: torch.device) -> Carrier:
    if device.type != "cpu":
        return SideStream(summed, device)
    return AtEnd(summed) if num_buckets == 1 else Threads(summed, num_buckets)


def agreed(rows: Sequence[Sequence[int]]) -> tuple[int, bool, list[bool]]:
    """Return (the count of items of all instances, whether any asks to stop, for each parameter whether any had a
    gradient), from what every instance has: its count, whether it asks to stop, its gradients."""
    count, stop, *present = (list(column) for column in zip(*rows, strict=True))
    return sum(count), any(stop), [any(column) for column in present]
