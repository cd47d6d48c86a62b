"""Random crops of large boxes in HDF5 files, periodic or not, with the 48 rotations and reflections of a cube.

`VolumeCrops` is the source of workloads that learn from simulated volumes. A box holds several datasets (channel, x, y,
z) of the same N³ cells; a sample is the same crop of each, copied and rotated by `cube_symmetries.py`. Crop i of a
training is a function of (seed, epoch, i); the feed says which epoch it is (`of_epoch`). Each dataset is read in one of
three ways:

    mapped     contiguous in the file: copied from the mapped file, which the instances of a host share
    resident   mode `memory`, chunked or compressed in the file: loaded
    chunked    mode `disk`, chunked or compressed: every crop is read through the HDF5 library

Mode `memory` reads everything when it opens a file, `disk` only what the crops need.
"""

import copy
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from podium.data.gather_pool import GatherPool
from podium.data.source import Arrays, Field
from podium.data.sources.hdf5 import (
    DAMAGE,
    available_bytes,
    check_stored,
    find_dataset,
    offset_in_file,
    open_hdf5,
    reopened_with_cache,
    unreadable,
)
from podium.data.volumes.cube_symmetries import SYMMETRIES, copy_crop, transformed_channels
from podium.errors import UserError
from podium.machine import counter_rng

Mode = Literal["memory", "disk"]

_READ_BYTES = 64 * 2**20
#: systems read ahead at most about this much for one announcement
_ANNOUNCED_BYTES = 128 * 2**10
_GB = 10**9


@dataclass(frozen=True)
class VolumeArray:
    """One dataset of a box, and which of its channels are the x, y and z components of vectors."""

    dataset: str
    num_channels: int
    vectors: tuple[tuple[int, int, int], ...] = ()


class VolumeCrops:
    """`num_samples` crops of `crop`³ cells, from one box or from several of the same size, delivered as float32.

    In training, crop i is drawn again in every epoch from (seed, epoch, i): box, corner and one of `turns`, numbers of
    `SYMMETRIES`. `turn_vectors=False` leaves vectors as they are while the box is rotated. Outside of training, and
    always with `fixed`, crops are drawn from (seed, i), and not rotated unless `turn_fixed`. Unless `periodic`, crops
    stay inside the box.
    """

    def __init__(
        self,
        path: Path | Sequence[Path],
        arrays: Mapping[str, VolumeArray],
        crop: int,
        num_samples: int,
        *,
        seed: int,
        mode: Mode = "memory",
        turns: Sequence[int] = range(len(SYMMETRIES)),
        turn_vectors: bool = True,
        periodic: bool = True,
        fixed: bool = False,
        turn_fixed: bool = False,
        threads: int | None = None,
    ) -> None:
        paths = [path] if isinstance(path, Path) else list(path)
        files = [_checked(each, arrays) for each in paths]
        self.size = _one_size(paths, files)
        if crop > self.size:
            raise UserError(f"{paths[0]} has boxes of {self.size}³ cells, too small for crops of {crop}³")
        if mode == "memory":
            _check_fits(files, paths)
        self.fields: Mapping[str, Field] = {
            name: Field((array.num_channels, crop, crop, crop), np.float32) for name, array in arrays.items()
        }
        self._boxes = [
            {name: _opened(each, dataset, mode) for name, dataset in datasets.items()}
            for each, datasets in zip(paths, files, strict=True)
        ]
        self._crop, self._length = crop, num_samples
        self._seed, self._fixed = seed, fixed
        self._turns, self._turn_fixed = turns, turn_fixed
        #: cells of an axis at which a crop may begin
        self._num_starts = self.size if periodic else self.size - crop + 1
        #: of every array, for every symmetry: where its channels come from, and their signs
        self._channels = {
            name: [
                transformed_channels(array.num_channels, array.vectors if turn_vectors else (), each)
                for each in SYMMETRIES
            ]
            for name, array in arrays.items()
        }
        self._pool = GatherPool(threads, "podium-volumes")
        self._epoch: int | None = None

    def __len__(self) -> int:
        return self._length

    def of_epoch(self, epoch: int) -> "VolumeCrops":
        """Return the crops of one epoch of a training, as `podium.data.source.EpochSource` describes."""
        if self._fixed:
            return self
        crops = copy.copy(self)
        crops._epoch = epoch
        return crops

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        self.begin(samples, out, places)()

    def begin(
        self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None
    ) -> Callable[[], None]:
        """Start to gather, as `podium.data.source.BackgroundSource` describes."""
        # A source that wraps this one must pass the epoch on: otherwise every epoch would have the same crops.
        assert places is None or self._fixed or self._epoch is not None
        drawn = self.drawn(samples)
        # All announced before the first is read
        for name in out:
            for box, start, _ in drawn:
                self._boxes[box][name].announce(start, self._crop)
        pieces = [(row, name) for row in range(len(samples)) for name in out]

        def fill(part: slice) -> None:
            for row, name in pieces[part]:
                box, start, turn = drawn[row]
                array, start = self._boxes[box][name].around(start, self._crop)
                copy_crop(array, start, SYMMETRIES[turn], *self._channels[name][turn], out[name][row])

        return self._pool.begin(len(pieces), fill)

    def drawn(self, samples: NDArray[np.int64]) -> list[tuple[int, tuple[int, int, int], int]]:
        """Return for every crop the box, the cell it begins at, and the number of its symmetry."""
        turns = self._turns if self._turn_fixed or self._epoch is not None else range(1)
        limits = (len(self._boxes), *(self._num_starts,) * 3, len(turns))
        stream = counter_rng.key("volumes", self._seed, "fixed" if self._epoch is None else self._epoch)
        words = counter_rng.words(stream, samples, len(limits)) >> np.uint64(32)
        # 32 random bits times the number of choices, divided by 2^32
        choices = (words * np.asarray(limits, np.uint64)) >> np.uint64(32)
        return [(box, (x, y, z), turns[turn]) for box, x, y, z, turn in choices.tolist()]


# ----------------------------------------------------------------------------------- three ways to the cells of a box

Start = tuple[int, int, int]


class _Cells(Protocol):
    def announce(self, start: Start, crop: int) -> None:
        """Prepare for reading this crop."""
        ...

    def around(self, start: Start, crop: int) -> tuple[NDArray, Start]:
        """Return an array (channel, n, n, n) that holds the crop, and where it begins there."""
        ...


class _Resident:
    def __init__(self, path: Path, dataset: h5py.Dataset) -> None:
        self._array = np.empty(dataset.shape, dataset.dtype)
        # In blocks: Ctrl-C takes effect between them.
        block = max(1, _READ_BYTES // self._array[0, 0].nbytes)
        try:
            for channel in range(len(self._array)):
                for first in range(0, dataset.shape[1], block):
                    part = np.s_[channel, first : first + block]
                    dataset.read_direct(self._array, part, part)
        except DAMAGE as error:
            raise unreadable(path, error) from error
        finally:
            dataset.file.close()

    def announce(self, start: Start, crop: int) -> None:
        pass

    def around(self, start: Start, crop: int) -> tuple[NDArray, Start]:
        return self._array, start


class _Mapped:
    """A contiguous dataset, through the file mapped into memory.

    Touching the map alone reads a few pages at a time and waits for each; announced first, many are read at once.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset, offset: int, *, read: bool) -> None:
        self._offset = offset
        mapped = np.memmap(path, dataset.dtype, "r", offset, dataset.shape)
        self._array = np.asarray(mapped)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._in_memory = read
        if read:
            self._read()
        dataset.file.close()

    def _read(self) -> None:
        """Read all of it into the system's cache and this process's map, piece by piece."""
        numbers = self._array.reshape(-1)
        block = _READ_BYTES // numbers.itemsize
        for first in range(0, len(numbers), block):
            piece = numbers[first : first + block]
            self._willneed(np.array([self._offset + first * numbers.itemsize]), piece.nbytes)
            piece[:: mmap.PAGESIZE // numbers.itemsize].max()

    def announce(self, start: Start, crop: int) -> None:
        if self._in_memory:
            return
        # Whole rows: up to 1,024 cells, they are on no more pages than the part that is needed.
        num_channels, size = self._array.shape[:2]
        row_bytes = size * self._array.itemsize
        planes = np.add.outer(np.arange(num_channels) * size, (start[0] + np.arange(crop)) % size)
        for first, count, _ in _runs(start[1], crop, size):
            self._willneed(self._offset + (planes.reshape(-1) * size + first) * row_bytes, count * row_bytes)

    def _willneed(self, offsets: NDArray[np.int64], num_bytes: int) -> None:
        """Announce `num_bytes` of the file at each of the offsets."""
        if not hasattr(os, "posix_fadvise"):
            return
        for first in range(0, num_bytes, _ANNOUNCED_BYTES):
            length = min(_ANNOUNCED_BYTES, num_bytes - first)
            for offset in (offsets + first).tolist():
                os.posix_fadvise(self._file, offset, length, os.POSIX_FADV_WILLNEED)

    def around(self, start: Start, crop: int) -> tuple[NDArray, Start]:
        return self._array, start


class _Chunked:
    """A dataset that only the HDF5 library can read: crop by crop, in up to eight pieces where one crosses an edge."""

    def __init__(self, path: Path, dataset: h5py.Dataset) -> None:
        self._path, self._id, self._dtype = path, reopened_with_cache(dataset), dataset.dtype
        self._num_channels, self._size = dataset.shape[:2]
        weakref.finalize(self, dataset.file.close)

    def announce(self, start: Start, crop: int) -> None:
        pass

    def around(self, start: Start, crop: int) -> tuple[NDArray, Start]:
        array = np.empty((self._num_channels, crop, crop, crop), self._dtype)
        memory, stored = h5py.h5s.create_simple(array.shape), self._id.get_space()
        try:
            for pieces in product(*(_runs(first, crop, self._size) for first in start)):
                begins, counts, places = zip(*pieces, strict=True)
                stored.select_hyperslab((0, *begins), (self._num_channels, *counts))
                memory.select_hyperslab((0, *places), (self._num_channels, *counts))
                self._id.read(memory, stored, array)
        except DAMAGE as error:
            raise unreadable(self._path, error) from error
        return array, (0, 0, 0)


def _runs(start: int, count: int, size: int) -> list[tuple[int, int, int]]:
    """Divide `count` cells from `start` of a periodic axis into runs: where each begins, its length, and how many cells
    come before it."""
    first = min(count, size - start)
    return [(start, first, 0), (0, count - first, first)] if first < count else [(start, count, 0)]


def _opened(path: Path, dataset: h5py.Dataset, mode: Mode) -> _Cells:
    offset = offset_in_file(dataset)
    if offset is not None:
        return _Mapped(path, dataset, offset, read=mode == "memory")
    return _Resident(path, dataset) if mode == "memory" else _Chunked(path, dataset)


# ------------------------------------------------------------------------------------------- checks when opening


def _checked(path: Path, arrays: Mapping[str, VolumeArray]) -> dict[str, h5py.Dataset]:
    """Return the datasets, each from its own handle, which is closed once nothing reads through it."""
    datasets = {}
    for name, array in arrays.items():
        dataset = find_dataset(path, open_hdf5(path), array.dataset)
        check_stored(path, dataset, array.dataset)
        shape = dataset.shape
        if len(shape) != 4 or shape[0] != array.num_channels or len(set(shape[1:])) > 1 or not shape[1]:
            raise UserError(
                f"{path}: {array.dataset} has shape {shape}, expected ({array.num_channels}, N, N, N) with the same N"
            )
        datasets[name] = dataset
    return datasets


def _one_size(paths: Sequence[Path], files: Sequence[Mapping[str, h5py.Dataset]]) -> int:
    assert files
    assert all(files)
    sizes = {
        f"{dataset.name.removeprefix('/')} of {path}": dataset.shape[1]
        for path, datasets in zip(paths, files, strict=True)
        for dataset in datasets.values()
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}³ cells" for name, size in sizes.items())
        raise UserError(f"All boxes must be of the same size, but {listed}")
    return next(iter(sizes.values()))


def _check_fits(files: Sequence[Mapping[str, h5py.Dataset]], paths: Sequence[Path]) -> None:
    """Raise if the boxes do not fit into memory: mapped ones are shared by a host's instances, loaded ones are not."""
    datasets = [dataset for each in files for dataset in each.values()]
    needed = sum(int(dataset.nbytes) for dataset in datasets)
    available = available_bytes(shared=all(offset_in_file(dataset) is not None for dataset in datasets))
    if needed > available:
        raise UserError(
            f"{paths[0]} needs {needed / _GB:.1f} GB of memory, but {available / _GB:.1f} GB are available: "
            "read it from the disk with `workload.data.mode=disk`"
        )
