"""Some of the samples of another source, under numbers of their own."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from podium.data.source import Arrays, BackgroundSource, EpochSource, Field, LengthSource, Source, gathers_in_caller


def subset(source: Source, numbers: NDArray[np.int64]) -> Source:
    """Return the samples `numbers` of a source, in this order; it gathers in the background if the source does, and
    differs from epoch to epoch if the source does."""
    if isinstance(source, EpochSource):
        return _EpochSubset(source, numbers)
    return _BackgroundSubset(source, numbers) if isinstance(source, BackgroundSource) else _Subset(source, numbers)


class _Subset:
    def __init__(self, source: Source, numbers: NDArray[np.int64]) -> None:
        self.fields: Mapping[str, Field] = source.fields
        self._source, self._numbers = source, numbers
        self.in_caller = gathers_in_caller(source)

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


class _EpochSubset(_BackgroundSubset):
    """Of a source whose samples differ from epoch to epoch; such a source gathers in the background as well."""

    def of_epoch(self, epoch: int) -> "_BackgroundSubset":
        assert isinstance(self._source, EpochSource)
        return _BackgroundSubset(self._source.of_epoch(epoch), self._numbers)

    def lengths(self, epoch: int | None = None) -> NDArray[np.int64]:
        assert isinstance(self._source, LengthSource)
        return self._source.lengths(epoch)[self._numbers]
