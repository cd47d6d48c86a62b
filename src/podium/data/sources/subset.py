"""Some of the samples of another source, under numbers of their own."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from podium.data.source import Arrays, BackgroundSource, EpochSource, Field, Source


def subset(source: Source, numbers: NDArray[np.int64]) -> Source:
    """Return the samples `numbers` of a source, in this order; it gathers in the background if the source does."""
    assert not isinstance(source, EpochSource), "an epoch would not reach the source"
    return _BackgroundSubset(source, numbers) if isinstance(source, BackgroundSource) else _Subset(source, numbers)


class _Subset:
    def __init__(self, source: Source, numbers: NDArray[np.int64]) -> None:
        self.fields: Mapping[str, Field] = source.fields
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self._source.gather(self._numbers[samples], out, places)


class _BackgroundSubset(_Subset):
    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        assert isinstance(self._source, BackgroundSource)
        return self._source.begin(self._numbers[samples], out, places)
