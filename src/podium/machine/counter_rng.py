"""Random numbers as a pure function of (seed, index, column): without state, any subset, the same everywhere.

Used for sample order, simulated parameters, generated data and seeds. A 64-bit finaliser (splitmix64's constants)
over a counter is random enough, runs vectorised in numpy and, unlike numpy's generators, needs no object per sample.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of every word: each bit of the result depends on all bits of `x` (a bijection on 64-bit words)."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def key(*parts: int | str) -> int:
    """Return a 64-bit key for names and integers; `key("order", 3, 7)` and `key("order", 37)` are unrelated."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def words(stream: int, index: NDArray[np.integer], width: int) -> NDArray[np.uint64]:
    """Return (len(index), width) random 64-bit words; row i depends only on (stream, index[i])."""
    with np.errstate(over="ignore"):
        row = mix(index.astype(np.uint64) * _GOLDEN + np.uint64(stream))
        column = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
        return mix(row[:, None] + column[None, :])


def uniforms(stream: int, index: NDArray[np.integer], width: int) -> NDArray[np.float64]:
    """Return (len(index), width) numbers uniform in [0, 1); row i depends only on (stream, index[i])."""
    return (words(stream, index, width) >> np.uint64(11)).astype(np.float64) * 2.0**-53
