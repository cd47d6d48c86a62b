"""Samples of several sources in given proportions: which sample comes when is a pure function of (seed, epoch)."""

from collections.abc import Callable, Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray

from podium.data.sample_order import order
from podium.data.source import (
    Arrays,
    Field,
    LengthSource,
    SampleRequest,
    Source,
    empty_buffers,
    gathers_in_caller,
    start_gather,
)
from podium.errors import UserError
from podium.machine import counter_rng


class MixedSource:
    """Samples of `sources` in the proportions of `mix`: `{"a": 0.7, "b": 0.3}`, in every epoch to the sample.

    An epoch has `num_samples`, by default as many as all sources together. Each source is gone through in an order of
    its own, again and again: no sample of it comes twice before all others have come, whichever epochs that takes. Of
    a sample that comes again, what is drawn at random is drawn anew.
    """

    def __init__(
        self, sources: Mapping[str, Source], mix: Mapping[str, float], *, seed: int, num_samples: int | None = None
    ) -> None:
        self._names = list(sources)
        _check(sources, mix)
        self._sources = [sources[name] for name in self._names]
        self.fields: Mapping[str, Field] = self._sources[0].fields
        self.in_caller = any(gathers_in_caller(source) for source in self._sources)
        self._length = num_samples or sum(len(source) for source in self._sources)
        self._seeds = [counter_rng.key("mix", seed, name) >> 1 for name in self._names]
        self._shares = _shares([mix[name] for name in self._names], self._length)
        self._firsts = np.cumsum([0, *self._shares])
        self._epoch: int | None = None
        #: of the epoch that was asked for last, as every block of it asks again
        self._last_lengths: tuple[int | None, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self._length

    def of_epoch(self, epoch: int) -> Self:
        """Return the samples of one epoch of a training, as `podium.data.source.EpochSource` describes."""
        source = object.__new__(type(self))
        source.__dict__.update(self.__dict__)
        source._epoch = epoch
        return source

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self.begin(samples, out, places)()

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """Start to gather, as `podium.data.source.BackgroundSource` describes."""
        assert places is None or self._epoch is not None
        parts = []
        for source, rows, passed, numbers in self._found(samples):
            buffers = empty_buffers(self.fields, len(rows))
            # Outside of training there are no epochs, and samples are as they are without random changes.
            request = SampleRequest(numbers) if places is None else SampleRequest(numbers, places[rows], passed)
            parts.append((rows, buffers, start_gather(source, request, buffers)))

        def finish() -> None:
            for rows, buffers, wait in parts:
                wait()
                for name, values in buffers.items():
                    out[name][rows] = values

        return finish

    def lengths(self, epoch: int | None = None) -> NDArray[np.int64]:
        """Return the length of every sample in an epoch."""
        if self._last_lengths is not None and self._last_lengths[0] == epoch:
            return self._last_lengths[1]
        lengths = np.empty(self._length, np.int64)
        source = self if epoch is None else self.of_epoch(epoch)
        for part, rows, passed, numbers in source._found(np.arange(self._length, dtype=np.int64)):
            if not isinstance(part, LengthSource):
                raise UserError("batch.shuffle = length: not all of the mixed datasets have fields that are padded")
            lengths[rows] = part.lengths(passed)[numbers]
        self._last_lengths = (epoch, lengths)
        return lengths

    def _found(self, samples: NDArray[np.int64]) -> list[tuple[Source, NDArray[np.int64], int, NDArray[np.int64]]]:
        """Return (source, rows of `samples`, how often the source was gone through before, samples of the source)."""
        found = []
        which = np.searchsorted(self._firsts, samples, side="right") - 1
        for index, source in enumerate(self._sources):
            (rows,) = np.nonzero(which == index)
            # How many samples of this source come before, in all epochs so far.
            count = samples[rows] - self._firsts[index] + (self._epoch or 0) * self._shares[index]
            passed, position = np.divmod(count, len(source))
            for number in np.unique(passed).tolist():
                here = passed == number
                numbers = order(self._seeds[index], number, position[here], len(source))
                found.append((source, rows[here], number, numbers))
        return found


def _check(sources: Mapping[str, Source], mix: Mapping[str, float]) -> None:
    if mix.keys() != sources.keys() or not mix:
        raise UserError(f"mix names {', '.join(mix) or 'nothing'}, but the datasets are {', '.join(sources)}")
    if not all(weight > 0 for weight in mix.values()):
        raise UserError(f"mix = {dict(mix)}: expected weights greater than 0; leave out a dataset that is not used")
    first, *others = sources
    for name in others:
        if dict(sources[name].fields) != dict(sources[first].fields):
            raise UserError(
                f"mix: the samples of {name} and {first} differ: {_shown(sources[name])} against "
                f"{_shown(sources[first])}; datasets that are mixed must have the same fields"
            )


def _shown(source: Source) -> str:
    return ", ".join(f"{name} {np.dtype(field.dtype)} {field.shape}" for name, field in source.fields.items())


def _shares(weights: list[float], num_samples: int) -> list[int]:
    """Divide `num_samples` by weight: rounded down, and one more each for those that lost most."""
    exact = [weight * num_samples / sum(weights) for weight in weights]
    shares = [int(part) for part in exact]
    by_loss = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_loss[: num_samples - sum(shares)]:
        shares[index] += 1
    return shares
