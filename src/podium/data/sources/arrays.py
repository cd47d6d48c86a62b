"""Samples of arrays that are in memory."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from podium.data.source import Arrays, Field


class ArraySource:
    """The samples of arrays in memory, each array optionally converted on delivery by `convert[name](rows, out)`."""

    def __init__(
        self,
        arrays: Arrays,
        fields: Mapping[str, Field] | None = None,
        convert: Mapping[str, Callable[[NDArray, NDArray], None]] | None = None,
    ) -> None:
        self.arrays = arrays
        self.fields = fields or {name: Field(array.shape[1:], array.dtype) for name, array in arrays.items()}
        self._convert = convert or {}
        (self._length,) = {len(array) for array in arrays.values()}

    def __len__(self) -> int:
        return self._length

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        for name, array in self.arrays.items():
            target = out[name]
            if name in self._convert:
                self._convert[name](array.take(samples, axis=0), target)
            elif array.dtype == target.dtype:
                # mode="clip" lets numpy write straight into `out`; the default mode buffers the whole result.
                array.take(samples, axis=0, out=target, mode="clip")
            else:
                target[...] = array.take(samples, axis=0)
