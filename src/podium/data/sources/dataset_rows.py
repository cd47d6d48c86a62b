"""Samples of a Dataset as rows of arrays: which fields they have, and how one sample is written into its row.

`SampleRows` reads one sample after the other, each with random numbers of its own; `dataset.py` calls it in the
training's process, `dataset_processes.py` in others.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from podium.data.padding import MASK, Pad
from podium.data.source import Arrays, Field, empty_buffers
from podium.data.sources.sample_parts import Parts, delivered, first_row
from podium.errors import UserError
from podium.machine import counter_rng
from podium.ui.user_frames import describe, user_frames

_FIRST_SEED = 0  # of the sample from which fields are learnt


class SampleRows:
    """The rows of a Dataset, with the fields of its first sample."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        name: str,
        collate: Callable[[list[Any]], Any] | None = None,
        pad: Mapping[str, Pad] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._pad = dict(pad or {})
        with own_generators():
            first = self._sample(0, _FIRST_SEED)
        self._parts = Parts(first, name, names)
        if unknown := self._pad.keys() - self._parts.paths.keys():
            known = ", ".join(self._parts.paths)
            raise UserError(f"pad names {min(unknown)!r}, but the samples of {name} have {known}")
        self._types: dict[str, np.dtype] = {}
        self.fields: dict[str, Field] = {}
        for field, array in self._parts.of(first, 0):
            self._types[field] = array.dtype
            shape = array.shape
            if field in self._pad:
                if array.ndim == 0:
                    raise UserError(f"pad names {field!r}, but {field} of {name} is a single number")
                shape = (self._pad[field].length, *array.shape[1:])
            self.fields[field] = Field(shape, delivered(array.dtype))
            if field in self._pad:
                self.fields[field + MASK] = Field(shape[:1], np.bool_)
        self._check_repeats(first)

    def fill(self, samples: NDArray[np.int64], epoch: int | None, out: Arrays) -> None:
        """Write sample `samples[i]` into row i of every array of `out`.

        Changes the state of the generators of torch, numpy and random: see `own_generators`.
        """
        stream = counter_rng.key("dataset", self._seed, "fixed" if epoch is None else epoch)
        seeds = counter_rng.words(stream, samples, 1)[:, 0]
        for row, (number, seed) in enumerate(zip(samples.tolist(), seeds.tolist(), strict=True)):
            self._write(self._sample(number, seed), number, out, row)

    def _sample(self, number: int, seed: int) -> Any:
        """Return a sample as the user's code makes it, with all random numbers drawn from `seed`."""
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        try:
            sample = self._dataset[number]
            return sample if self._collate is None else first_row(self._collate([sample]))
        except (Exception, SystemExit) as error:
            raise UserError(f"sample {number} of {self.name} raised {describe(error)}{user_frames(error)}") from None

    def _write(self, sample: Any, number: int, out: Arrays, row: int) -> None:
        for field, array in self._parts.of(sample, number):
            if array.dtype != self._types[field] and not np.can_cast(array.dtype, self._types[field], "safe"):
                raise UserError(
                    f"{field} of sample {number} of {self.name} is {array.dtype}, but that of sample 0 is "
                    f"{self._types[field]}: return one type for all samples"
                )
            rows = out[field]
            if field in self._pad:
                self._write_padded(array, field, number, rows[row], out[field + MASK][row])
            elif array.shape == rows.shape[1:]:
                rows[row] = array
            else:
                raise UserError(
                    f"{field} of sample {number} of {self.name} has shape {array.shape}, but that of sample 0 has "
                    f"{rows.shape[1:]}: make all samples the same shape, or give pad for {field} if only its length "
                    "varies"
                )

    def _write_padded(self, array: NDArray, field: str, number: int, rows: NDArray, mask: NDArray[np.bool_]) -> None:
        pad = self._pad[field]
        if array.ndim != rows.ndim or array.shape[1:] != rows.shape[1:]:
            wanted = ", ".join(["any length", *map(str, rows.shape[1:])])
            raise UserError(
                f"{field} of sample {number} of {self.name} has shape {array.shape}, expected ({wanted}): only the "
                "first axis is padded"
            )
        if len(array) > pad.length and pad.too_long == "refuse":
            raise UserError(
                f"{field} of sample {number} of {self.name} has length {len(array)}, more than the {pad.length} that "
                "pad allows: give a greater length, or too_long='cut'"
            )
        length = min(len(array), pad.length)
        rows[:length] = array[:length]
        rows[length:] = pad.value
        mask[:length] = True
        mask[length:] = False

    def _check_repeats(self, first: Any) -> None:
        """Refuse a Dataset that draws from a generator of its own: nothing could make its samples the same again."""
        once, again = empty_buffers(self.fields, 1), empty_buffers(self.fields, 1)
        self._write(first, 0, once, 0)
        with own_generators():
            self._write(self._sample(0, _FIRST_SEED), 0, again, 0)
        for field in self.fields:
            if once[field].tobytes() != again[field].tobytes():
                raise UserError(
                    f"{field} of sample 0 of {self.name} differs from one call to the next: draw random numbers with "
                    "torch, numpy.random or random, which Podium seeds for every sample; a generator of your own can "
                    "take its seed from one of them inside __getitem__"
                )


@contextmanager
def own_generators() -> Iterator[None]:
    """Give the process its own random numbers back afterwards, as if no sample had been made.

    Samples are made by one thread (numpy's products included, whose bits depend on their number), outside of inference
    mode, wherever that is.
    """
    python, legacy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(of_torch)
