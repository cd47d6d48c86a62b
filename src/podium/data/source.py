"""Sources: where samples come from. A source delivers many samples at once into buffers that the feed reuses.

`Source` is what the feed, validation and prediction see. `sources/` holds the ones for arrays, HDF5 files and generated
samples; `images/`, `text/` and `volumes/` hold those for their kind of data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class Field:
    """Shape and type of one sample's part of a batch, as delivered (not as stored)."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    #: a workload reads its values on the host (`on_host`), where they stay available beside those on an accelerator
    read_on_host: bool = False

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class SampleRequest(NamedTuple):
    """Samples by number, with their places in the training, from which their augmentation is drawn.

    A sample's place is the number of samples that come before it in the training, whichever instance carries them.
    Outside of training there are no places and no epoch. All samples of a request belong to one epoch.
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
class BackgroundSource(Protocol):
    """A source that gathers in the background: the next block may start while the previous one is still in progress."""

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """Start what `gather` does and return at once; calling the result waits until it is done."""
        ...


@runtime_checkable
class EpochSource(Protocol):
    """A source whose sample i differs from epoch to epoch: a function of (seed, epoch, i)."""

    def of_epoch(self, epoch: int) -> Source:
        """Return the samples of this epoch."""
        ...


@runtime_checkable
class LengthSource(Protocol):
    """A source that knows how long each sample is, for an order in which samples of like length come together."""

    def lengths(self, epoch: int | None = None) -> NDArray[np.int64]:
        """Return the length of every sample, in an epoch of a training if they differ from epoch to epoch."""
        ...


def gathers_in_caller(source: Source) -> bool:
    """Return whether a source has to gather in the thread that uses the samples, and nobody else's work beside it: it
    runs code of the user's that draws from the process's own random numbers, as models do in training."""
    return bool(getattr(source, "in_caller", False))


def start_gather(source: Source, request: SampleRequest, out: Arrays) -> Callable[[], None]:
    """Start to gather and return what waits for the end; sources without a background do all the work right here."""
    samples, places, epoch = request
    if epoch is not None and isinstance(source, EpochSource):
        source = source.of_epoch(epoch)
    if isinstance(source, BackgroundSource):
        return source.begin(samples, out, places)
    source.gather(samples, out, places)
    return lambda: None


_ON_HOST = "on the host: "


def host_name(name: str) -> str:
    """Return the name under which a batch has a field's values on the host, where the batch is on an accelerator."""
    return _ON_HOST + name


def on_host(batch: "Mapping[str, Tensor]", name: str) -> "Tensor":
    """Return the values of a field that is declared with `read_on_host`, without waiting for an accelerator."""
    return batch.get(host_name(name), batch[name])


def empty_buffers(fields: Mapping[str, Field], num_samples: int) -> dict[str, NDArray]:
    """Return uninitialised arrays with room for `num_samples` delivered samples."""
    return {name: np.empty((num_samples, *field.shape), field.dtype) for name, field in fields.items()}
