"""The feed: blocks of samples gathered ahead of time by a background thread into buffers used again and again.

Training, validation and prediction all read through it. It knows nothing of replicas or updates: `train_blocks` and
`pass_blocks` say which samples come next, the feed fetches them.
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

from podium.batch import BatchSection
from podium.data.arrays import Source, Starting, Wanted, begin_gather, empty_buffers
from podium.data.order import order
from podium.threads import stay_single

#: A block holds at most about this much: big enough that one gather serves many small micro-batches, small enough to
#: stay in the processor's cache and to keep memory use flat.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Block:
    """Samples ready for use: `rows[name][i]` is the sample `samples[i]`. Valid until the next block is asked for."""

    samples: NDArray[np.int64]
    rows: Mapping[str, Tensor]


def train_blocks(
    *,
    seed: int,
    num_samples: int,
    batch: BatchSection,
    replicas: range,
    first_update: int,
    last_update: int,
    updates_per_block: int,
) -> Iterator[Wanted]:
    """What `replicas` want in updates first … last - 1, block by block: (update, replica, slot), flattened.

    A pure function of its arguments. An epoch has `num_samples // global_batch` updates; what is left over differs
    from epoch to epoch, as every epoch has an order of its own. No block crosses an epoch. With `shuffle: shard`, the
    samples are divided evenly between all replicas and every replica has an order of its own part.
    """
    per_replica = batch.micro_batch * batch.num_accumulation
    shard = num_samples // batch.num_replicas
    updates_per_epoch = num_samples // batch.global_batch
    update = first_update
    while update < last_update:
        epoch, within = divmod(update, updates_per_epoch)
        num_updates = min(updates_per_block, last_update - update, updates_per_epoch - within)
        updates = np.arange(within, within + num_updates, dtype=np.int64)
        offsets = np.arange(replicas.start * per_replica, replicas.stop * per_replica, dtype=np.int64)
        positions = (updates[:, None] * batch.global_batch + offsets[None, :]).reshape(-1)
        places = positions + epoch * updates_per_epoch * batch.global_batch
        if batch.shuffle == "global":
            yield Wanted(order(seed, epoch, positions, num_samples), places, epoch)
        else:
            within_shard = (updates[:, None] * per_replica + np.arange(per_replica, dtype=np.int64)).reshape(-1)
            parts = [order(seed, epoch, within_shard, shard, first=replica * shard) for replica in replicas]
            # (replica, update, slot) -> (update, replica, slot)
            samples = np.stack(parts).reshape(len(replicas), num_updates, per_replica).swapaxes(0, 1).reshape(-1)
            yield Wanted(samples, places, epoch)
        update += num_updates


def pass_blocks(num_samples: int, micro_batch: int, per_block: int, index: int = 0, count: int = 1) -> Iterator[Wanted]:
    """All samples once, in their own order, cut into micro-batches of which instance `index` of `count` takes every
    `count`-th; `per_block` of these make a block. The last micro-batch holds what is left."""
    starts = range(index * micro_batch, num_samples, count * micro_batch)
    for first in range(0, len(starts), per_block):
        parts = [
            np.arange(start, min(start + micro_batch, num_samples), dtype=np.int64)
            for start in starts[first : first + per_block]
        ]
        yield Wanted(np.concatenate(parts))


def samples_per_block(source: Source, unit: int, max_units: int | None = None) -> int:
    """A whole number of `unit` samples that makes a block of about BLOCK_BYTES."""
    sample_bytes = sum(field.num_bytes for field in source.fields.values())
    units = max(1, BLOCK_BYTES // max(1, sample_bytes * unit))
    return unit * (units if max_units is None else min(units, max_units))


class Feed:
    """Iterates over blocks. Use as a context manager: leaving it ends the thread."""

    def __init__(
        self,
        source: Source,
        blocks: Iterator[Wanted],
        max_samples: int,
        *,
        prefetch: int = 2,
        device: torch.device | None = None,
        waited: Callable[[float], None] | None = None,
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._device = device or torch.device("cpu")
        self._waited = waited or (lambda _seconds: None)
        self._stop = threading.Event()
        # One buffer is in use by the caller, one is being filled (or two), the rest wait in the queue.
        self._num_filling = 2 if isinstance(source, Starting) else 1
        self._free: queue.SimpleQueue[dict[str, NDArray]] = queue.SimpleQueue()
        for _ in range(prefetch + 1 + self._num_filling):
            self._free.put(empty_buffers(source.fields, max_samples))
        self._ready: queue.SimpleQueue[tuple[NDArray, dict[str, NDArray]] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._fill, name="podium-feed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._free.put({})  # wakes a thread that waits for a buffer
        self._thread.join()

    def __iter__(self) -> Iterator[Block]:
        while True:
            began = time.perf_counter()
            item = self._ready.get()
            self._waited(time.perf_counter() - began)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            samples, buffers = item
            rows = {name: torch.from_numpy(buffer[: len(samples)]) for name, buffer in buffers.items()}
            if self._device.type != "cpu":
                rows = {name: tensor.to(self._device) for name, tensor in rows.items()}
            yield Block(samples, rows)
            self._free.put(buffers)

    def _fill(self) -> None:
        stay_single()
        try:
            # What gathers in the background is given the next block before the end of this one: nobody is idle there.
            under_way: deque[tuple[NDArray, dict[str, NDArray], Callable[[], None]]] = deque()
            with suppress(StopIteration):
                while not self._stop.is_set():
                    wanted = next(self._blocks)
                    buffers = self._free.get()
                    if self._stop.is_set():
                        break
                    rows = {name: buffer[: len(wanted.samples)] for name, buffer in buffers.items()}
                    under_way.append((wanted.samples, buffers, begin_gather(self._source, wanted, rows)))
                    if len(under_way) == self._num_filling:
                        self._hand_over(*under_way.popleft())
            while under_way:
                self._hand_over(*under_way.popleft())
            self._ready.put(None)
        except BaseException as error:  # handed to whoever reads, who raises it where it can be seen
            self._ready.put(error)

    def _hand_over(self, samples: NDArray, buffers: dict[str, NDArray], finish: Callable[[], None]) -> None:
        finish()
        self._ready.put((samples, buffers))
