"""Which samples come next, block by block: pure functions of the recipe, the update and the replicas.

`train_blocks` plans a training, `pass_blocks` one pass over a split; `feed.py` fetches what they yield. Nothing here
touches data, so the plan can be tested, replayed and resumed from any update.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from podium.data.sample_order import order, order_by_length
from podium.data.source import LengthSource, SampleRequest, Source
from podium.errors import UserError
from podium.recipe.sections.batch import BatchSection

#: A block holds at most about this much: big enough that one gather serves many small micro-batches, small enough to
#: stay in the processor's cache and to keep memory use flat.
BLOCK_BYTES = 8 * 2**20


def train_blocks(
    *,
    seed: int,
    num_samples: int,
    batch: BatchSection,
    replicas: range,
    first_update: int,
    last_update: int,
    updates_per_block: int,
    lengths: Callable[[int], NDArray[np.int64]] | None = None,
) -> Iterator[SampleRequest]:
    """Yield what `replicas` need for updates first … last - 1, block by block: (update, replica, slot), flattened.

    A pure function of its arguments. An epoch has `num_samples // global_batch` updates; the samples left over differ
    from epoch to epoch, since each epoch has its own order. No block crosses an epoch. With `shuffle: shard`, the
    samples are divided evenly between all replicas, and each replica shuffles its own part. With `shuffle: length`, the
    samples of a micro-batch are of like length: `lengths` returns those of all samples in an epoch.
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
            yield SampleRequest(order(seed, epoch, positions, num_samples), places, epoch)
        elif batch.shuffle == "length":
            assert lengths is not None
            samples = order_by_length(seed, epoch, positions, lengths(epoch), batch.micro_batch)
            yield SampleRequest(samples, places, epoch)
        else:
            within_shard = (updates[:, None] * per_replica + np.arange(per_replica, dtype=np.int64)).reshape(-1)
            parts = [order(seed, epoch, within_shard, shard, first=replica * shard) for replica in replicas]
            # (replica, update, slot) -> (update, replica, slot)
            samples = np.stack(parts).reshape(len(replicas), num_updates, per_replica).swapaxes(0, 1).reshape(-1)
            yield SampleRequest(samples, places, epoch)
        update += num_updates


def lengths_for(batch: BatchSection, source: Source) -> Callable[[int], NDArray[np.int64]] | None:
    """Return what `train_blocks` needs to know of the samples' lengths, or None; raise UserError if nobody knows."""
    if batch.shuffle != "length":
        return None
    if not isinstance(source, LengthSource):
        raise UserError(
            "batch.shuffle = length: the samples of this workload have no lengths; use global, or a Dataset whose "
            "fields are padded"
        )
    source.lengths(0)  # mistakes show before the training begins
    return source.lengths


def pass_blocks(
    num_samples: int,
    micro_batch: int,
    per_block: int,
    index: int = 0,
    count: int = 1,
    *,
    spread_over: int | None = None,
) -> Iterator[SampleRequest]:
    """Yield all samples once, in their own order, in blocks of `per_block` micro-batches.

    Instance `index` of `count` takes every `count`-th micro-batch. The last micro-batch holds what remains. With
    `spread_over`, the samples are evenly spread over that many: their neighbours are often alike.
    """
    starts = range(index * micro_batch, num_samples, count * micro_batch)
    for first in range(0, len(starts), per_block):
        parts = [
            np.arange(start, min(start + micro_batch, num_samples), dtype=np.int64)
            for start in starts[first : first + per_block]
        ]
        numbers = np.concatenate(parts)
        yield SampleRequest(numbers if spread_over is None else spread_evenly(numbers, num_samples, spread_over))


def spread_evenly(numbers: NDArray[np.int64], num: int, over: int) -> NDArray[np.int64]:
    """Return where numbers 0 … num - 1 go when they are spread evenly over 0 … over - 1, the first at 0."""
    return numbers * over // num


def samples_per_block(source: Source, unit: int, max_units: int | None = None) -> int:
    """Return how many samples make a block of about BLOCK_BYTES: a multiple of `unit`."""
    sample_bytes = sum(field.num_bytes for field in source.fields.values())
    units = max(1, BLOCK_BYTES // max(1, sample_bytes * unit))
    return unit * (units if max_units is None else min(units, max_units))
