"""The samples of a map-style Dataset of torch's kind: anything with a length and `dataset[i]`.

What a sample draws at random (torch, numpy.random, random) is a function of (seed, epoch, sample), so augmentations
are the same with any number of processes that prepare samples, on any number of instances, and after a resume.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from podium.data.padding import MASK, Pad
from podium.data.source import Arrays, Field
from podium.data.sources.dataset_processes import SampleProcesses
from podium.data.sources.dataset_rows import SampleRows, own_generators
from podium.errors import UserError
from podium.ui.user_frames import describe, user_frames

_LENGTHS_AT_ONCE = 1024


class DatasetSource:
    """The samples of a Dataset, as fields of fixed shape.

    A sample may be a tensor, an array, a number, or a mapping, tuple or dataclass of them, nested or not. The fields
    of a pair are `input` and `target`, those of longer tuples `input0`, `input1`, … and `target` unless `names` are
    given, those of a mapping its keys; nested ones are joined by a dot. Real numbers of 64 bits are delivered in 32.

    `workers`: processes that prepare samples, each instance having its own; 0: the training's process, between
    updates. `collate` is called with a list of one sample and returns a batch of one: which samples share a
    micro-batch must not change them. `pad`: fields whose first axis differs in length from sample to sample.
    `lengths`: those of all samples, for `batch.shuffle: length`; otherwise every sample is made once to learn them.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        pad: Mapping[str, Pad] | None = None,
        names: Sequence[str] | None = None,
        lengths: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> None:
        name = _name(dataset)
        if workers < 0:
            raise UserError(f"workers = {workers}: expected 0 or more processes that prepare samples")
        self._dataset, self._name = dataset, name
        self._length = _length(dataset, name)
        self._rows = SampleRows(dataset, seed, name=name, collate=collate, pad=pad, names=names)
        self.fields: Mapping[str, Field] = self._rows.fields
        self._padded = tuple(pad or ())
        self._lengths = None if lengths is None else np.asarray(lengths, np.int64)
        if self._lengths is not None and self._lengths.shape != (self._length,):
            raise UserError(f"lengths has shape {self._lengths.shape}, but {name} has {self._length} samples")
        self._processes = SampleProcesses(workers, self.fields, self._rows.fill, name) if workers else None
        self._epoch: int | None = None

    @property
    def in_caller(self) -> bool:
        """Whether samples are made in this process, whose random numbers the training draws as well."""
        return self._processes is None

    def __len__(self) -> int:
        return self._length

    def of_epoch(self, epoch: int) -> Self:
        """Return the samples of one epoch of a training, as `podium.data.source.EpochSource` describes."""
        source = copy.copy(self)
        source._epoch = epoch
        return source

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self.begin(samples, out, places)()

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """Start to gather, as `podium.data.source.BackgroundSource` describes."""
        # A source that wraps this one must pass the epoch on: otherwise every epoch would have the same random numbers.
        assert places is None or self._epoch is not None
        self._check_length()
        if self._processes is not None:
            return self._processes.begin(samples, self._epoch, out)
        with own_generators():
            self._rows.fill(samples, self._epoch, out)
        return lambda: None

    def lengths(self, epoch: int | None = None) -> NDArray[np.int64]:
        """Return the length of every sample: as given, or of the field that is padded, the longest of several."""
        if self._lengths is None:
            if not self._padded:
                raise UserError(f"batch.shuffle = length: the samples of {self._name} have one length; give pad")
            self._lengths = self._measured()
        return self._lengths

    def close(self) -> None:
        """End the processes that prepare samples."""
        if self._processes is not None:
            self._processes.close()

    def _measured(self) -> NDArray[np.int64]:
        lengths = np.empty(self._length, np.int64)
        for first in range(0, self._length, _LENGTHS_AT_ONCE):
            samples = np.arange(first, min(first + _LENGTHS_AT_ONCE, self._length), dtype=np.int64)
            out = {name: np.empty((len(samples), *of.shape), of.dtype) for name, of in self.fields.items()}
            self.gather(samples, out)
            each = [out[field + MASK].sum(axis=1) for field in self._padded]
            lengths[samples] = np.max(each, axis=0)
        return lengths

    def _check_length(self) -> None:
        if (now := _length(self._dataset, self._name)) != self._length:
            raise UserError(
                f"{self._name} had {self._length} samples when it was opened and has {now} now: the length of a "
                "Dataset must not change, as the order of the samples depends on it"
            )


def _name(dataset: Any) -> str:
    """Return what messages call it: its class, and that of the dataset which it is a part of."""
    inner = getattr(dataset, "dataset", None)
    name = type(dataset).__name__
    return name if inner is None or name != "Subset" else f"a Subset of {_name(inner)}"


def _length(dataset: Any, name: str) -> int:
    kind = type(dataset)
    # By its name, so that torch's and Hugging Face's are found alike: torch's inherits a __getitem__ that only raises.
    iterable = any(base.__name__ == "IterableDataset" for base in kind.__mro__)
    if iterable or not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
        if iterable or hasattr(kind, "__iter__"):
            raise UserError(
                f"{name} is an iterable dataset: its samples have no numbers, so no order could be the same on any "
                "number of instances or after a resume; write it once with podium.data.indexed.write_indexed(dataset, "
                "folder) and train on IndexedDataset(folder)"
            )
        raise UserError(f"{name} is not a Dataset: expected an object with __len__ and __getitem__")
    try:
        length = len(dataset)
    except Exception as error:
        raise UserError(f"the length of {name} raised {describe(error)}{user_frames(error)}") from None
    if length == 0:
        raise UserError(f"{name} has no samples")
    return length
