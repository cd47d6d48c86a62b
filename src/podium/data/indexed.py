"""A store of samples by number: what an iterable dataset is written into once, so that it can be trained on exactly.

A folder with `samples.json` (fields, types and shapes) and, for every field, its numbers in one file and, where
samples differ in length, their shapes in another. It is mapped into memory and read without running anything.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from podium.data.source import Field
from podium.data.sources.sample_parts import NUMBERS, Parts
from podium.errors import UserError, system_reason
from podium.machine.atomic_files import create_folder
from podium.ui.user_frames import describe, user_frames

_INDEX, _FORMAT = "samples.json", 1
_MAX_INDEX_BYTES = 2**20
_MAX_DIMENSIONS = 8


def write_indexed(dataset: Iterable[Any], folder: Path | str, *, max_samples: int | None = None) -> Path:
    """Write the samples of an iterable, in its order, into a new folder, and return the folder.

    Samples are tensors, arrays, numbers, or mappings, tuples and dataclasses of them; fields have the names that
    `DatasetSource` gives them. Only the number of dimensions of a field must be the same in all samples. The folder
    appears complete or not at all.
    """
    folder = Path(folder)
    name = type(dataset).__name__
    if folder.exists():
        raise UserError(f"{folder} already exists: remove it, or choose another folder")

    def fill(aside: Path) -> None:
        with ExitStack() as files:
            writer, parts = _Writer(aside, files), None
            samples = iter(dataset)
            while max_samples is None or writer.num_samples < max_samples:
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                except Exception as error:
                    at = f"sample {writer.num_samples} of {name}"
                    raise UserError(f"{at} raised {describe(error)}{user_frames(error)}") from None
                parts = parts or Parts(sample, name)
                writer.add(dict(parts.of(sample, writer.num_samples)), name)
            if writer.num_samples == 0:
                raise UserError(f"{name} has no samples")
            writer.finish()

    try:
        create_folder(folder, fill)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {system_reason(error)}") from error
    return folder


class _Writer:
    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder, self._files = folder, files
        self._fields: dict[str, tuple[np.dtype, int]] = {}
        self._values: dict[str, IO[bytes]] = {}
        self._shapes: dict[str, IO[bytes]] = {}
        self._equal: dict[str, tuple[int, ...] | None] = {}
        self.num_samples = 0

    def add(self, sample: Mapping[str, NDArray], name: str) -> None:
        if not self._fields:
            for number, (field, array) in enumerate(sample.items()):
                self._fields[field] = (array.dtype, array.ndim)
                self._equal[field] = array.shape
                self._values[field] = self._files.enter_context((self._folder / f"{number}.values").open("wb"))
                self._shapes[field] = self._files.enter_context((self._folder / f"{number}.shapes").open("wb"))
        for field, array in sample.items():
            dtype, dimensions = self._fields[field]
            if array.ndim != dimensions or not np.can_cast(array.dtype, dtype, "safe"):
                raise UserError(
                    f"{field} of sample {self.num_samples} of {name} is {array.dtype} with {array.ndim} dimensions, "
                    f"but that of sample 0 is {dtype} with {dimensions}"
                )
            self._values[field].write(np.ascontiguousarray(array, dtype).tobytes())
            self._shapes[field].write(struct.pack(f"<{dimensions}q", *array.shape))
            if self._equal[field] != array.shape:
                self._equal[field] = None
        self.num_samples += 1

    def finish(self) -> None:
        for file in (*self._values.values(), *self._shapes.values()):
            file.close()
        fields = []
        for number, (field, (dtype, dimensions)) in enumerate(self._fields.items()):
            equal = self._equal[field]
            if equal is not None:
                (self._folder / f"{number}.shapes").unlink()
            fields.append({"name": field, "dtype": dtype.str, "dimensions": dimensions, "shape": equal})
        index = {"format": _FORMAT, "samples": self.num_samples, "fields": fields}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class IndexedDataset:
    """The samples that `write_indexed` wrote: a mapping from field to array each."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        index = self._read_index()
        try:
            self._length = _count(index["samples"])
            fields = {of["name"]: _stored(of) for of in index["fields"]}
            if index["format"] != _FORMAT or not fields:
                raise ValueError(f"its format is {index['format']}")
            self._fields = {name: self._open(number, *stored) for number, (name, stored) in enumerate(fields.items())}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self._folder} is damaged: {describe(error)}") from None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, NDArray]:
        if not 0 <= number < self._length:
            raise IndexError(f"{self._folder} has {self._length} samples, but sample {number} was asked for")
        sample = {}
        for name, (values, shapes, starts) in self._fields.items():
            if starts is None:
                sample[name] = np.array(values[number])
            else:
                assert shapes is not None
                sample[name] = np.array(values[starts[number] : starts[number + 1]]).reshape(shapes[number])
        return sample

    def lengths(self, field: str) -> NDArray[np.int64]:
        """Return the length of the first axis of a field in every sample, for `DatasetSource(lengths=…)`."""
        if field not in self._fields:
            raise UserError(f"{self._folder} has no field {field!r}; it holds {', '.join(self._fields)}")
        values, shapes, _ = self._fields[field]
        return np.full(self._length, values.shape[1]) if shapes is None else np.array(shapes[:, 0])

    def _read_index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        try:
            with path.open("rb") as file:
                index = json.loads(file.read(_MAX_INDEX_BYTES))
        except OSError:
            raise UserError(f"{self._folder} is not a store of samples: there is no file {path}") from None
        except ValueError:
            raise UserError(f"{path} is damaged: it is not JSON") from None
        if not isinstance(index, dict):
            raise UserError(f"{path} is damaged: it does not hold a mapping")
        return index

    def _open(
        self, number: int, stored: Field, dimensions: int, equal: bool
    ) -> tuple[NDArray, NDArray[np.int64] | None, NDArray[np.int64] | None]:
        values = self._mapped(f"{number}.values", np.dtype(stored.dtype))
        if equal:
            if len(values) != self._length * math.prod(stored.shape):
                raise ValueError(f"{number}.values is truncated")
            return values.reshape(self._length, *stored.shape), None, None
        shapes = self._mapped(f"{number}.shapes", np.dtype("<i8")).reshape(self._length, dimensions)
        sizes = np.prod(shapes, axis=1)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if (shapes < 0).any() or starts[-1] != len(values):
            raise ValueError(f"{number}.shapes does not belong to {number}.values")
        return values, shapes, starts

    def _mapped(self, name: str, dtype: np.dtype) -> NDArray:
        path = self._folder / name
        try:
            size = path.stat().st_size
            if size % dtype.itemsize:
                raise ValueError(f"{name} is truncated")
            return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
        except OSError as error:
            raise UserError(f"{self._folder} is damaged: {name}: {system_reason(error)}") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value


def _stored(of: Mapping[str, Any]) -> tuple[Field, int, bool]:
    dtype, dimensions, shape = np.dtype(str(of["dtype"])), _count(of["dimensions"]), of["shape"]
    if dtype.kind not in NUMBERS or dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"numbers of type {dtype} with {dimensions} dimensions")
    return Field(tuple(_count(size) for size in shape or ()), dtype), dimensions, shape is not None
