"""The order in which samples are trained on: a pure function of (seed, epoch, position), in bounded memory.

Owns the keyed permutation. `sample_plan.py` asks for the samples at the positions it needs, in any order and on any
instance; nothing about the order is ever stored, so resuming costs nothing.
"""

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from podium.machine import counter_rng

#: up to here an epoch's order is one cached table (512 KiB): microseconds per call, and every permutation is possible
_TABLE = 1 << 16
#: beyond, positions are permuted in blocks that stay in the processor's cache
_BLOCK = 1 << 13
_ROUNDS = 8
#: among how many micro-batches samples of like length find each other: enough that little is padded, few enough that
#: what comes together differs from epoch to epoch
POOL_MICRO_BATCHES = 64

_U = np.uint64
_M1, _M2 = _U(0xFF51AFD7ED558CCD), _U(0xC4CEB9FE1A85EC53)
_S24, _S32, _S40 = _U(24), _U(32), _U(40)


def order(
    seed: int,
    epoch: int,
    positions: NDArray[np.int64],
    num_samples: int,
    *,
    first: int = 0,
    shuffle: bool = True,
) -> NDArray[np.int64]:
    """Return the samples at `positions` (0 ≤ position < `num_samples`) of an epoch.

    The whole epoch is a permutation of the samples [first, first + num_samples): with `first`, a shard is shuffled
    within itself, differently from all others. Without `shuffle`, positions are samples. At most 2^40 samples.
    """
    assert 1 <= num_samples <= 1 << 40
    if not shuffle:
        return positions + first if first else positions.copy()
    stream = counter_rng.key("order", seed, epoch, first)
    if num_samples <= _TABLE:
        # an index beyond the end raises an error of its own
        samples = _table(stream, num_samples)[positions]
        return samples + first if first else samples
    x = positions.astype(np.uint64).reshape(-1)
    # a negative position is a huge unsigned number, so one comparison checks both ends
    assert not x.size or int(x.max()) < num_samples
    for start in range(0, len(x), _BLOCK):
        permute(stream, x[start : start + _BLOCK], num_samples)
    samples = x.view(np.int64).reshape(positions.shape)
    return np.add(samples, first, out=samples) if first else samples


@lru_cache(maxsize=8)
def _table(stream: int, num_samples: int) -> NDArray[np.int64]:
    """Return a whole permutation: indices sorted by random words, which are distinct, being a bijection of them."""
    table = np.argsort(counter_rng.words(stream, np.arange(num_samples), 1)[:, 0])
    table.flags.writeable = False
    return table


@lru_cache(maxsize=8)
def _round_keys(stream: int) -> tuple[np.uint64, ...]:
    return tuple(counter_rng.words(stream, np.arange(1), _ROUNDS)[0])


def permute(stream: int, x: NDArray[np.uint64], num_samples: int) -> None:
    """Replace every x in [0, num_samples) by its image, in place.

    A Feistel network with additions instead of exclusive ors works on any rectangle num_left × num_right, which is
    chosen just large enough: at most √n too many. Results outside are permuted again until they are inside (cycle
    walking), on average 1 + 1/√n evaluations instead of up to 2 for a power of two. An even side makes odd permutations
    possible.
    """
    num_left = isqrt(num_samples - 1) + 1
    num_left += num_left & 1
    num_right = -(-num_samples // num_left)
    _network(_round_keys(stream), x, num_left, num_right)
    (outside,) = np.nonzero(x >= num_samples)
    while outside.size:
        walked = x[outside]
        _network(_round_keys(stream), walked, num_left, num_right)
        x[outside] = walked
        outside = outside[walked >= num_samples]


def _network(keys: tuple[np.uint64, ...], x: NDArray[np.uint64], num_left: int, num_right: int) -> None:
    """Evaluate the network once on [0, num_left · num_right), in place, without allocating inside the rounds."""
    left = x // _U(num_right)
    right = x - left * _U(num_right)
    word, spare = np.empty_like(x), np.empty_like(x)
    source, target, size, other = right, left, _U(num_left), _U(num_right)
    for key in keys:
        np.multiply(source, _M1, out=word)
        np.add(word, key, out=word)
        np.right_shift(word, _S32, out=spare)
        np.bitwise_xor(word, spare, out=word)
        np.multiply(word, _M2, out=word)
        # the top 40 bits times the size, divided by 2^40, is uniform in [0, size) and cannot overflow (size < 2^21)
        np.right_shift(word, _S24, out=word)
        np.multiply(word, size, out=word)
        np.right_shift(word, _S40, out=word)
        # (target + word) mod size: where nothing is to be subtracted, the unsigned difference wraps and is the larger
        np.add(target, word, out=target)
        np.subtract(target, size, out=spare)
        np.minimum(target, spare, out=target)
        source, target, size, other = target, source, other, size
    np.multiply(left, _U(num_right), out=left)
    np.add(left, right, out=x)


def order_by_length(
    seed: int, epoch: int, positions: NDArray[np.int64], lengths: NDArray[np.int64], micro_batch: int
) -> NDArray[np.int64]:
    """Return the samples at `positions` of an epoch in which those of a micro-batch have about the same length.

    The epoch's permutation is divided into pools; each pool is sorted by length and cut into micro-batches, which are
    shuffled. A pure function of its arguments, as `order` is; the positions that would make an incomplete micro-batch
    at the end of the permutation come last.
    """
    num_samples = len(lengths)
    pool = POOL_MICRO_BATCHES * micro_batch
    whole = num_samples // micro_batch * micro_batch
    samples = np.empty_like(positions)
    for number in np.unique(positions // pool).tolist():
        here = positions // pool == number
        table = _pool_by_length(
            seed,
            epoch,
            number,
            lengths,
            range(number * pool, min((number + 1) * pool, num_samples)),
            whole,
            micro_batch,
        )
        samples[here] = table[positions[here] - number * pool]
    return samples


def _pool_by_length(
    seed: int, epoch: int, number: int, lengths: NDArray[np.int64], positions: range, whole: int, micro_batch: int
) -> NDArray[np.int64]:
    drawn = order(seed, epoch, np.arange(positions.start, positions.stop, dtype=np.int64), len(lengths))
    sorted_part, rest = drawn[: max(0, whole - positions.start)], drawn[max(0, whole - positions.start) :]
    by_length = sorted_part[np.argsort(lengths[sorted_part], kind="stable")].reshape(-1, micro_batch)
    words = counter_rng.words(counter_rng.key("by length", seed, epoch, number), np.arange(len(by_length)), 1)[:, 0]
    return np.concatenate([by_length[np.argsort(words)].reshape(-1), rest])
