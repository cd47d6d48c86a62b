"""Generated samples: random numbers of the right shapes, for every workload's `data.source: generated`.

A small pool of samples is drawn once; sample i is row hash(seed, i) of the pool. So a sample depends only on (seed, i),
delivering it costs one copy, and a model can learn the pool, since inputs and targets of a row belong together.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from podium.data.source import Arrays, Field
from podium.machine import counter_rng

# Enough rows for a batch to vary, little memory compared with a model.
_MAX_POOL_ROWS = 512
_MAX_POOL_BYTES = 32 << 20
# Uniform numbers with mean 0 and variance 1, as normalised inputs have.
_UNIT_VARIANCE = (-math.sqrt(3.0), math.sqrt(3.0))


class GeneratedSource:
    """`num_samples` random samples with the given fields.

    Real fields are uniform in `ranges[name]` (by default with mean 0 and variance 1); integer fields need a range
    (low, high) and lie in low … high - 1, so labels of ten classes have the range (0, 10); booleans are fair coins.
    Splits share one seed and number their samples from different `first_sample`s.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        num_samples: int,
        *,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        seed: int = 0,
        first_sample: int = 0,
    ) -> None:
        ranges = ranges or {}
        assert ranges.keys() <= fields.keys(), f"ranges for unknown fields: {ranges.keys() - fields.keys()}"
        self.fields = fields
        self._num_samples = num_samples
        self._first_sample = first_sample
        self._stream = counter_rng.key("generated", "row", seed)
        num_bytes = max(1, sum(field.num_bytes for field in fields.values()))
        self._num_rows = max(2, min(_MAX_POOL_ROWS, _MAX_POOL_BYTES // num_bytes))
        self._pool = {
            name: _pool(field, self._num_rows, ranges.get(name), counter_rng.key("generated", name, seed))
            for name, field in fields.items()
        }

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        row = counter_rng.words(self._stream, samples + self._first_sample, 1)[:, 0] % np.uint64(self._num_rows)
        rows = row.astype(np.int64)
        for name, pool in self._pool.items():
            pool.take(rows, axis=0, out=out[name], mode="clip")


def _pool(field: Field, num_rows: int, bounds: tuple[float, float] | None, stream: int) -> NDArray:
    dtype = np.dtype(field.dtype)
    width = math.prod(field.shape)
    pool = np.empty((num_rows, *field.shape), dtype)
    flat = pool.reshape(num_rows, width)
    # Row by row: a row of a large field takes megabytes of 64-bit words to draw.
    for row in range(num_rows):
        flat[row] = _draw(counter_rng.uniforms(stream, np.array([row]), width)[0], dtype, bounds)
    return pool


def _draw(uniform: NDArray[np.float64], dtype: np.dtype, bounds: tuple[float, float] | None) -> NDArray:
    if dtype.kind == "b":
        return uniform < 0.5
    if dtype.kind in "iu":
        assert bounds is not None, "an integer field needs a range"
        return np.floor(bounds[0] + uniform * (bounds[1] - bounds[0])).astype(dtype)
    assert dtype.kind == "f", f"cannot generate numbers of type {dtype}"
    low, high = bounds or _UNIT_VARIANCE
    return low + uniform * (high - low)
