"""Samples of a Dataset as rows of arrays: which fields they have, and how one sample is written into its row.

`SampleRows` reads one sample after the other, each with random numbers of its own; `dataset.py` calls it in the
training's process, `dataset_processes.py` in others.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.source import Arrays, Field, empty_buffers
from podium.errors import UserError
from podium.machine import counter_rng
from podium.ui.user_frames import describe, user_frames

_NUMBERS = "biufc"  # kinds of numpy types: booleans, integers, real and complex numbers
_FIRST_SEED = 0  # of the sample from which fields are learnt
#: of a field that is padded: where its mask is found
MASK = "_mask"
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Pad:
    """How samples of unequal length become rows of one length: their first axis is filled up to `length` with `value`.

    A field `NAME_mask` is true where there are numbers of the sample's own.
    """

    length: int
    value: float = 0
    #: what becomes of longer samples
    too_long: Literal["refuse", "cut"] = "refuse"


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
        self._names = None if names is None else tuple(names)
        with own_generators():
            first = self._sample(0, _FIRST_SEED)
        self._containers: list[tuple[Path, int]] = []
        self._paths = dict(self._find(first, (), ()))
        if unknown := self._pad.keys() - self._paths.keys():
            raise UserError(f"pad names {min(unknown)!r}, but the samples of {name} have {', '.join(self._paths)}")
        self.fields: dict[str, Field] = {}
        for field, path in self._paths.items():
            array = self._array(_at(first, path), field, 0)
            if field in self._pad:
                if array.ndim == 0:
                    raise UserError(f"pad names {field!r}, but {field} of {name} is a single number")
                self.fields[field] = Field((self._pad[field].length, *array.shape[1:]), array.dtype)
                self.fields[field + MASK] = Field((self._pad[field].length,), np.bool_)
            else:
                self.fields[field] = Field(array.shape, array.dtype)
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
            return sample if self._collate is None else _first_row(self._collate([sample]))
        except (Exception, SystemExit) as error:
            raise UserError(f"sample {number} of {self.name} raised {describe(error)}{user_frames(error)}") from None

    def _write(self, sample: Any, number: int, out: Arrays, row: int) -> None:
        self._check_parts(sample, number)
        for field, path in self._paths.items():
            array = self._array(_at(sample, path), field, number)
            if field in self._pad:
                self._write_padded(array, field, number, out, row)
                continue
            rows = out[field]
            if array.shape != rows.shape[1:] or array.dtype != rows.dtype:
                self._check(array, self.fields[field], field, number)
            rows[row] = array

    def _find(self, value: Any, path: Path, shown: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        """Yield (name, path) of every field of a sample, or of a part of it: `shown` is the name of the part."""
        keys: Sequence[Any]
        if is_dataclass(value) and not isinstance(value, type):
            keys = names = tuple(of.name for of in fields(value))
        elif isinstance(value, Mapping):
            keys, names = tuple(value), tuple(map(str, value))
        elif isinstance(value, tuple) or (isinstance(value, list) and not _is_numbers(value)):
            keys = range(len(value))
            names = getattr(value, "_fields", None) or (tuple(map(str, keys)) if path else self._part_names(len(value)))
        else:
            yield ".".join(shown) if path else self._part_names(1)[0], path
            return
        if not keys:
            raise UserError(f"{'.'.join(shown) or 'sample 0'} of {self.name} is empty: expected tensors or numbers")
        self._containers.append((path, len(keys)))
        for key, name in zip(keys, names, strict=True):
            yield from self._find(_at(value, (key,)), (*path, key), (*shown, name))

    def _part_names(self, count: int) -> tuple[str, ...]:
        if self._names is None:
            return {1: ("input",), 2: ("input", "target")}.get(count, tuple(map(str, range(count))))
        if len(self._names) != count:
            raise UserError(f"names has {len(self._names)} names, but a sample of {self.name} has {count} parts")
        return self._names

    def _check_parts(self, sample: Any, number: int) -> None:
        for path, count in self._containers:
            try:
                value = _at(sample, path)
                found = len(value) if hasattr(value, "__len__") else len(fields(value))
            except (KeyError, IndexError, TypeError, AttributeError):
                found = -1
            if found != count:
                where = f"its part {'.'.join(map(str, path))}" if path else "it"
                raise UserError(
                    f"sample {number} of {self.name} has other parts than sample 0: {where} should have {count} of "
                    "them; every sample must have the same fields"
                )

    def _array(self, value: Any, field: str, number: int) -> NDArray:
        if isinstance(value, Tensor):
            # numpy has no bfloat16; every value of it is one of float32
            array: NDArray = (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
            return array
        if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
            return value
        if isinstance(value, bool | int | np.generic | np.ndarray):
            array = np.asarray(value)
        elif isinstance(value, float | list):
            array = np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(np.float32)  # what Python calls a float has torch's precision, not its own
        else:
            array = np.asarray(None)
        if array.dtype.kind not in _NUMBERS:
            kind = f"an array of {array.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            raise UserError(
                f"{field} of sample {number} of {self.name} is {kind}: expected tensors, arrays or numbers; leave it "
                "out or turn it into numbers"
            )
        return array

    def _check(self, array: NDArray, expected: Field, field: str, number: int) -> None:
        if array.shape != expected.shape:
            raise UserError(
                f"{field} of sample {number} of {self.name} has shape {array.shape}, but that of sample 0 has "
                f"{expected.shape}: make all samples the same shape, or give pad for {field} if only its length varies"
            )
        self._check_type(array, expected, field, number)

    def _check_type(self, array: NDArray, expected: Field, field: str, number: int) -> None:
        if array.dtype != expected.dtype and not np.can_cast(array.dtype, expected.dtype, "safe"):
            raise UserError(
                f"{field} of sample {number} of {self.name} is {array.dtype}, but that of sample 0 is "
                f"{np.dtype(expected.dtype)}: return one type for all samples"
            )

    def _write_padded(self, array: NDArray, field: str, number: int, out: Arrays, row: int) -> None:
        pad, expected = self._pad[field], self.fields[field]
        if array.ndim != len(expected.shape) or array.shape[1:] != expected.shape[1:]:
            rest = ", ".join(["any length", *map(str, expected.shape[1:])])
            raise UserError(
                f"{field} of sample {number} of {self.name} has shape {array.shape}, expected ({rest}): only the "
                "first axis is padded"
            )
        self._check_type(array, expected, field, number)
        if len(array) > pad.length and pad.too_long == "refuse":
            raise UserError(
                f"{field} of sample {number} of {self.name} has length {len(array)}, more than the {pad.length} that "
                "pad allows: give a greater length, or too_long='cut'"
            )
        length = min(len(array), pad.length)
        rows, mask = out[field][row], out[field + MASK][row]
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

    Samples are made by one thread, outside of inference mode, wherever that is: so their bits do not depend on it.
    """
    python, legacy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(of_torch)


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if hasattr(value, "__getitem__") else getattr(value, key)
    return value


def _is_numbers(value: list[Any]) -> bool:
    """Return whether a list, or its lists, hold plain numbers only: then it is an array, not a list of fields."""
    return bool(value) and all(
        isinstance(item, bool | int | float) or (isinstance(item, list) and _is_numbers(item)) for item in value
    )


def _first_row(batch: Any) -> Any:
    """Return what a collate function made of one sample, without the axis of the samples."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: _first_row(getattr(batch, field.name)) for field in fields(batch)}
    if isinstance(batch, Mapping):
        return {key: _first_row(value) for key, value in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and not _is_numbers(batch)):
        return tuple(_first_row(value) for value in batch)
    return batch[0]
