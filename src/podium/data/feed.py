"""The feed: blocks of samples, gathered ahead of time by a background thread into buffers that are reused.

Training, validation and prediction all read through it. It knows nothing of replicas or updates: `sample_plan.py` says
which samples come next, the feed fetches them.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.source import (
    Arrays,
    BackgroundSource,
    SampleRequest,
    Source,
    empty_buffers,
    gathers_in_caller,
    start_gather,
)
from podium.data.upload import Upload
from podium.machine.threads import stay_single


@dataclass(frozen=True)
class Block:
    """Samples ready for use: `rows[name][i]` is the sample `samples[i]`. Valid until the next block is requested."""

    samples: NDArray[np.int64]
    rows: Mapping[str, Tensor]


def num_feed_buffers(source: Source, prefetch: int) -> int:
    """Return how many buffers a feed has: one in use by the caller, those being filled, the rest waits in the queue."""
    return prefetch + 1 + _num_filling(source)


def buffer_bytes(source: Source, max_samples: int, prefetch: int, num_blocks: int) -> int:
    """Return the memory of a feed's buffers, as far as so many blocks fill them."""
    num_buffers = 1 if gathers_in_caller(source) else num_feed_buffers(source, prefetch)
    sample_bytes = sum(field.num_bytes for field in source.fields.values())
    return sample_bytes * max_samples * min(num_buffers, num_blocks)


def _num_filling(source: Source) -> int:
    return 2 if isinstance(source, BackgroundSource) else 1


class Feed:
    """An iterator over blocks. Use it as a context manager: leaving it ends the thread."""

    def __init__(
        self,
        source: Source,
        blocks: Iterator[SampleRequest],
        max_samples: int,
        *,
        prefetch: int = 2,
        device: torch.device | None = None,
        waited: Callable[[float], None] | None = None,
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._upload = None if device is None or device.type == "cpu" else Upload(device, source.fields)
        self._waited = waited or (lambda _seconds: None)
        self._stop = threading.Event()
        self._in_caller = gathers_in_caller(source)
        if self._in_caller:
            prefetch = -1
        self._num_filling = _num_filling(source)
        self._free: queue.SimpleQueue[dict[str, NDArray]] = queue.SimpleQueue()
        for _ in range(num_feed_buffers(source, prefetch)):
            made = (
                empty_buffers(source.fields, max_samples) if self._upload is None else self._upload.buffers(max_samples)
            )
            self._free.put(made)
        self._ready: queue.SimpleQueue[tuple[NDArray, dict[str, NDArray]] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._fill, name="podium-feed", daemon=True)

    def __enter__(self) -> Self:
        if not self._in_caller:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._free.put({})  # wakes a thread that waits for a buffer
        if not self._in_caller:
            self._thread.join()

    def __iter__(self) -> Iterator[Block]:
        if self._in_caller:
            yield from self._gathered_here()
            return
        while True:
            began = time.perf_counter()
            item = self._ready.get()
            self._waited(time.perf_counter() - began)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            samples, buffers = item
            yield self._block(samples, buffers)
            self._free.put(buffers)

    def _gathered_here(self) -> Iterator[Block]:
        """Yield the blocks of a source that gathers in the thread that uses them."""
        buffers = self._free.get()
        for request in self._blocks:
            began = time.perf_counter()
            if self._upload is not None:
                self._upload.wait(buffers)
            rows = {name: buffer[: len(request.samples)] for name, buffer in buffers.items()}
            start_gather(self._source, request, rows)()
            self._waited(time.perf_counter() - began)
            yield self._block(request.samples, buffers)

    def _block(self, samples: NDArray[np.int64], buffers: Arrays) -> Block:
        if self._upload is not None:
            return Block(samples, self._upload.rows(buffers, len(samples)))
        return Block(samples, {name: torch.from_numpy(buffer[: len(samples)]) for name, buffer in buffers.items()})

    def _fill(self) -> None:
        stay_single()
        try:
            # A source that gathers in the background gets the next block early, so that its threads never idle.
            in_progress: deque[tuple[NDArray, dict[str, NDArray], Callable[[], None]]] = deque()
            with suppress(StopIteration):
                while not self._stop.is_set():
                    request = next(self._blocks)
                    buffers = self._free.get()
                    if self._stop.is_set():
                        break
                    if self._upload is not None:
                        self._upload.wait(buffers)
                    rows = {name: buffer[: len(request.samples)] for name, buffer in buffers.items()}
                    in_progress.append((request.samples, buffers, start_gather(self._source, request, rows)))
                    if len(in_progress) == self._num_filling:
                        self._hand_over(*in_progress.popleft())
            while in_progress:
                self._hand_over(*in_progress.popleft())
            self._ready.put(None)
        except BaseException as error:  # handed to the reader, who raises it where it can be seen
            self._ready.put(error)

    def _hand_over(self, samples: NDArray, buffers: dict[str, NDArray], finish: Callable[[], None]) -> None:
        finish()
        self._ready.put((samples, buffers))
