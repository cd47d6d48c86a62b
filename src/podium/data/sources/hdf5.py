"""Samples of HDF5 files: in memory if they fit the budget, otherwise read from the file on request.

`Hdf5Source` checks whatever can be checked without reading samples when it is opened, and keeps numbers as they are
stored: float16 rows become float32 on delivery. Each array is read in one of three ways:

    resident   in memory
    mapped     contiguous in the file: the system is told which rows are needed, then they are copied from the map
    chunked    chunked or compressed in the file: read row by row in file order, through a cache of whole chunks
"""

import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from podium.data.source import Arrays, Field
from podium.data.sources.hdf5_links import check_own_numbers, follow_links
from podium.errors import UserError, system_reason
from podium.machine.bounded_files import open_regular
from podium.machine.memory import num_sharing

#: A torch operation on at most this many numbers stays in the thread that calls it.
_SERIAL_NUMBERS = 32768
_READ_BYTES = 64 * 2**20
_CHUNK_CACHE_BYTES = 16 * 2**20
_GB = 10**9

#: what h5py raises about files that are not as the format describes
DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


@dataclass(frozen=True)
class Hdf5Array:
    """One array of a file: the shape its samples must have (None: any size), and which part of it is delivered."""

    dataset: str
    shape: tuple[int | None, ...]
    #: which entries of a sample's last axis are delivered; None: all
    columns: tuple[int, ...] | None = None


class Hdf5Source:
    """The first `max_samples` samples of an HDF5 file, delivered as float32.

    Arrays are loaded into memory, smallest first, as long as they fit `memory_budget` (bytes; None: half of what is
    available now, 0: none of them).
    """

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, Hdf5Array],
        *,
        max_samples: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.path = path
        file = open_hdf5(path)
        weakref.finalize(self, file.close)
        datasets = {name: find_dataset(path, file, array.dataset) for name, array in arrays.items()}
        for name, array in arrays.items():
            _check(path, datasets[name], array)
        self.num_stored = _num_samples(path, datasets)
        self._length = self.num_stored if max_samples is None else min(max_samples, self.num_stored)
        self.fields: Mapping[str, Field] = {
            name: Field(_delivered_shape(datasets[name], arrays[name]), np.float32) for name in arrays
        }

        budget = available_bytes() // 2 if memory_budget is None else memory_budget
        #: bytes of samples in memory
        self.resident_bytes = 0
        self._rows: dict[str, _Rows] = {}
        sizes = {name: self._length * _row_bytes(datasets[name], self.fields[name].shape) for name in arrays}
        for name in sorted(arrays, key=sizes.__getitem__):
            if self.resident_bytes + sizes[name] <= budget:
                self._rows[name] = _Resident(_load(path, datasets[name], self._length, arrays[name].columns))
                self.resident_bytes += sizes[name]
            else:
                self._rows[name] = _streamed(path, datasets[name], arrays[name].columns)

    @property
    def resident(self) -> bool:
        """Whether every array is in memory."""
        return all(isinstance(rows, _Resident) for rows in self._rows.values())

    def __len__(self) -> int:
        return self._length

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        for name, rows in self._rows.items():
            rows.read(samples, out[name])


def available_bytes(*, shared: bool = False) -> int:
    """Return the memory available now: this instance's share, or all of it for what the instances have in common."""
    return int(psutil.virtual_memory().available) // (1 if shared else num_sharing())


def budget_bytes(memory_budget_gb: float | None) -> int | None:
    """Convert the `memory_budget_gb` of a recipe to what `Hdf5Source` takes."""
    return None if memory_budget_gb is None else int(memory_budget_gb * _GB)


def widen(rows: NDArray, out: NDArray) -> None:
    """Copy `rows` to `out`, fast for float16 to float32.

    Torch uses the processor's conversion instructions and is 8 times as fast as numpy. It gets pieces too small to
    divide between threads: this runs beside the training, and must not compete with its threads.
    """
    if rows.dtype != np.float16 or not (rows.flags.c_contiguous and out.flags.c_contiguous):
        out[...] = rows
        return
    pieces = torch.from_numpy(rows.reshape(-1)).split(_SERIAL_NUMBERS)
    targets = torch.from_numpy(out.reshape(-1)).split(_SERIAL_NUMBERS)
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece)


# --------------------------------------------------------------------------- three ways to the rows of an array


class _Rows(Protocol):
    def read(self, samples: NDArray[np.int64], out: NDArray) -> None:
        """Copy row samples[i] into out[i]."""
        ...


class _Resident:
    def __init__(self, array: NDArray) -> None:
        self.array = array

    def read(self, samples: NDArray[np.int64], out: NDArray) -> None:
        _take(self.array, samples, out)


class _Mapped:
    """Rows of a contiguous dataset, through the file mapped into memory.

    Touching the map alone reads one row at a time and waits for each. Announcing all rows first lets the disk work
    on many at once: 14 times as many samples a second from a virtual disk, at almost no cost if the file is already in
    the system's cache.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset, columns: tuple[int, ...] | None) -> None:
        self._offset = dataset.id.get_offset()
        self._columns = columns
        self._array = np.asarray(np.memmap(path, dataset.dtype, "r", self._offset, dataset.shape))
        self._row_bytes = self._array[0].nbytes
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, samples: NDArray[np.int64], out: NDArray) -> None:
        if hasattr(os, "posix_fadvise"):
            for offset in (self._offset + np.sort(samples) * self._row_bytes).tolist():
                os.posix_fadvise(self._file, offset, self._row_bytes, os.POSIX_FADV_WILLNEED)
        if self._columns is None:
            _take(self._array, samples, out)
        else:
            widen(_picked(self._array.take(samples, axis=0), self._columns), out)


class _Chunked:
    """Rows of a dataset that only the HDF5 library can read.

    One low-level read per row: h5py's list selections cost 5 to 20 times as much. Rows of one chunk follow one
    another, so each chunk is read and decompressed once per call.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset, columns: tuple[int, ...] | None) -> None:
        self._path = path
        self._columns = columns
        self._id = reopened_with_cache(dataset)
        self._dtype = dataset.dtype
        self._row_shape = dataset.shape[1:]

    def read(self, samples: NDArray[np.int64], out: NDArray) -> None:
        in_order, place = np.unique(samples, return_inverse=True)
        rows = np.empty((len(in_order), *self._row_shape), self._dtype)
        counts = (1, *self._row_shape)
        memory, stored = h5py.h5s.create_simple(counts), self._id.get_space()
        zeros = (0,) * len(self._row_shape)
        try:
            for i, sample in enumerate(in_order.tolist()):
                stored.select_hyperslab((sample, *zeros), counts)
                self._id.read(memory, stored, rows[i : i + 1])
        except DAMAGE as error:
            raise unreadable(self._path, error) from error
        _take(rows if self._columns is None else _picked(rows, self._columns), place, out)


def _take(array: NDArray, samples: NDArray[np.int64], out: NDArray) -> None:
    if array.dtype == out.dtype:
        # mode="clip" lets numpy write straight into `out`; the default mode buffers the whole result.
        array.take(samples, axis=0, out=out, mode="clip")
    else:
        widen(array.take(samples, axis=0), out)


def _picked(rows: NDArray, columns: tuple[int, ...]) -> NDArray:
    """Return rows[..., columns], contiguous; column by column is 2 to 6 times as fast as numpy's own ways."""
    picked = np.empty((*rows.shape[:-1], len(columns)), rows.dtype)
    for place, column in enumerate(columns):
        picked[..., place] = rows[..., column]
    return picked


def _streamed(path: Path, dataset: h5py.Dataset, columns: tuple[int, ...] | None) -> _Rows:
    return _Chunked(path, dataset, columns) if offset_in_file(dataset) is None else _Mapped(path, dataset, columns)


def offset_in_file(dataset: h5py.Dataset) -> int | None:
    """Return where its numbers begin in the file; None unless they are stored as in memory, and can be mapped."""
    offset: int | None = dataset.id.get_offset()  # None unless contiguous and in this file
    contiguous = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
    # h5py has one type for every form of numbers in a file that fits into it.
    stored_alike = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
    # Numpy copies a whole array before taking rows from it if its numbers are not aligned.
    aligned = offset is not None and offset % dataset.dtype.itemsize == 0
    return offset if contiguous and stored_alike and aligned else None


def reopened_with_cache(dataset: h5py.Dataset) -> h5py.h5d.DatasetID:
    """Reopen a dataset with a cache for a few chunks: without one, every row decompresses its chunk again."""
    if dataset.chunks is None:
        return dataset.id
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if chunk_bytes > available_bytes() // 4:
        raise UserError(
            f"{dataset.file.filename}: {dataset.name} is stored in chunks of {chunk_bytes / _GB:.1f} GB, too large for "
            "this machine: write it with smaller ones"
        )
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(1009, max(_CHUNK_CACHE_BYTES, 4 * chunk_bytes), 1.0)
    return h5py.h5d.open(dataset.file.id, dataset.name.encode(), access)


def _load(path: Path, dataset: h5py.Dataset, num_samples: int, columns: tuple[int, ...] | None) -> NDArray:
    width = dataset.shape[-1] if columns is None else len(columns)
    array = np.empty((num_samples, *dataset.shape[1:-1], width), dataset.dtype)
    # In blocks: little memory beside the result, and Ctrl-C takes effect between them.
    block = max(1, _READ_BYTES // max(1, _row_bytes(dataset, dataset.shape[1:])))
    try:
        for start in range(0, num_samples, block):
            stop = min(start + block, num_samples)
            if columns is None:
                dataset.read_direct(array, np.s_[start:stop], np.s_[start:stop])
            else:
                array[start:stop] = _picked(dataset[start:stop], columns)
    except DAMAGE as error:
        raise unreadable(path, error) from error
    return array


# ------------------------------------------------------------------------------------------- checks when opening


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading; a UserError says why that fails."""
    try:
        open_regular(path).close()
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from error
    if not h5py.is_hdf5(path):
        raise UserError(f"{path} is not an HDF5 file")
    try:
        return h5py.File(path, "r", locking="best-effort")
    except DAMAGE as error:
        if "truncated" in str(error):
            raise _truncated(path) from error
        raise UserError(f"{path} cannot be opened as an HDF5 file: {' '.join(str(error).split())[:300]}") from error


def find_dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset of a file; a UserError says which ones there are, or that its numbers are in another file.

    A dataset in another file would be read differently by each of the three ways, and may be any file of the user's.
    """
    try:
        dataset = follow_links(path, file, name)
        if dataset is not None:
            check_own_numbers(path, file, dataset)
        else:
            present = ", ".join(sorted(file)[:20]) or "nothing"
    except DAMAGE as error:
        raise unreadable(path, error) from error
    if dataset is None:
        raise UserError(f"{path} has no dataset {name!r}; it holds {present}")
    return dataset


def check_stored(path: Path, dataset: h5py.Dataset, name: str) -> None:
    """Check that its numbers are of a type that sources deliver, and that none are missing."""
    try:
        dtype, shape, offset = dataset.dtype, dataset.shape, dataset.id.get_offset()
        num_bytes = dataset.id.get_storage_size()
    except DAMAGE as error:
        raise unreadable(path, error) from error
    if not shape:  # None: HDF5's own kind of nothing, (): a single number
        raise UserError(f"{path}: {name} holds {'nothing' if shape is None else 'a single number'}, expected samples")
    if dtype not in (np.float16, np.float32):
        raise UserError(f"{path}: {name} holds numbers of type {dtype}, expected float16 or float32")
    if math.prod(shape) * dtype.itemsize >= 2**62:
        raise UserError(f"{path}: {name} has shape {shape}, which no file can hold")
    if offset is not None and offset + max(num_bytes, math.prod(shape) * dtype.itemsize) > path.stat().st_size:
        raise _truncated(path)


def _check(path: Path, dataset: h5py.Dataset, array: Hdf5Array) -> None:
    name = array.dataset
    check_stored(path, dataset, name)
    shape = dataset.shape[1:]
    if len(shape) != len(array.shape) or any(e not in (None, s) for e, s in zip(array.shape, shape, strict=True)):
        wanted = ", ".join(["samples", *("any" if size is None else str(size) for size in array.shape)])
        raise UserError(f"{path}: {name} has shape {dataset.shape}, expected ({wanted})")
    if array.columns and max(array.columns) >= shape[-1]:
        raise UserError(f"{path}: {name} has columns 0 to {shape[-1] - 1}, but column {max(array.columns)} is needed")


def _num_samples(path: Path, datasets: Mapping[str, h5py.Dataset]) -> int:
    lengths = {dataset.name.removeprefix("/"): len(dataset) for dataset in datasets.values()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{path}: the arrays differ in their number of samples: {counts}")
    length = next(iter(lengths.values()))
    if length == 0:
        raise UserError(f"{path}: {next(iter(lengths))} holds no samples")
    return length


def _delivered_shape(dataset: h5py.Dataset, array: Hdf5Array) -> tuple[int, ...]:
    shape: tuple[int, ...] = dataset.shape[1:]
    return shape if array.columns is None else (*shape[:-1], len(array.columns))


def _row_bytes(dataset: h5py.Dataset, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(dataset.dtype.itemsize)


def _truncated(path: Path) -> UserError:
    return UserError(f"{path} is a truncated HDF5 file: copy or create it again")


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the error to raise where the HDF5 library cannot read."""
    return UserError(f"{path} is damaged or cannot be read: {' '.join(str(error).split())[:300]}")
