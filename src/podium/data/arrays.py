"""Sources: where samples come from. A source delivers many samples at once into buffers that the feed reuses.

`Source` is what the feed, validation and prediction see; `ArraySource` serves arrays that are in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class Field:
    """Shape and type of one sample's part of a batch, as delivered (not as stored)."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Wanted(NamedTuple):
    """Samples by number, and where in the training each has its place: what it is augmented with is drawn from there.

    A place is the number of samples that come before in the training, whoever carries them; none outside of training,
    and no epoch. All are of one epoch.
    """

    samples: NDArray[np.int64]
    places: NDArray[np.int64] | None = None
    epoch: int | None = None


class Source(Protocol):
    """Samples by number. `gather` writes sample `samples[i]` into row i of every array of `out`.

    Sources that augment do so where `places` are given, as a function of (seed, place).
    """

    fields: Mapping[str, Field]

    def __len__(self) -> int: ...

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None: ...


@runtime_checkable
class Starting(Protocol):
    """A source that gathers in the background: one block may be begun while the one before is still under way."""

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """As `gather`, but returns at once; what it returns waits for the end of it."""
        ...


@runtime_checkable
class Redrawn(Protocol):
    """A source whose sample i is another in every epoch of a training: a function of (seed, epoch, i)."""

    def of_epoch(self, epoch: int) -> Source:
        """The samples as this epoch has them."""
        ...


def begin_gather(source: Source, wanted: Wanted, out: Arrays) -> Callable[[], None]:
    """Begins to gather, or does all of it where the source knows no other way; what it returns waits for the end."""
    samples, places, epoch = wanted
    if epoch is not None and isinstance(source, Redrawn):
        source = source.of_epoch(epoch)
    if isinstance(source, Starting):
        return source.begin(samples, out, places)
    source.gather(samples, out, places)
    return lambda: None


class ArraySource:
    """Samples of arrays in memory, each optionally transformed on the way (`convert[name](rows, out)`)."""

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


def empty_buffers(fields: Mapping[str, Field], num_samples: int) -> dict[str, NDArray]:
    """Uninitialised arrays that can hold `num_samples` delivered samples."""
    return {name: np.empty((num_samples, *field.shape), field.dtype) for name, field in fields.items()}
