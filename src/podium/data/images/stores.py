"""Where encoded images come from, TFRecord shards or folders of files, and where they are cached.

Encoded images may be cached in memory or in one file on a local disk when first read. Called by `source.py`.
"""

import hashlib
import os
import re
import struct
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from podium.data.formats.tfrecord import OpenFiles, RecordFile, parse_example
from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import read_limited
from podium.machine.cache_folder import cache_folder

Split = Literal["train", "valid", "test"]
Cache = Literal["none", "memory", "disk"]

_SPLIT_NAMES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("validation", "val", "valid"),
    "test": ("test",),
}
#: folders of files: people also call those for validation `test`; shards of that name have no labels
_FOLDER_NAMES: Mapping[Split, tuple[str, ...]] = {**_SPLIT_NAMES, "valid": (*_SPLIT_NAMES["valid"], "test")}
_ADVICE = ": `workload.data.valid_path` may name another, or `workload.data.valid_samples` hold out training images"
#: the most that is read as one image
_IMAGE_BYTES = 256 << 20
_SUFFIXES = (".jpeg", ".jpg", ".png")
_BOX_KEYS = tuple(f"image/object/bbox/{side}" for side in ("ymin", "xmin", "ymax", "xmax"))
#: shards kept open, and shards indexed at the same time (each waits for its disk)
_MAX_OPEN, _MAX_INDEXING = 256, 16


class EncodedSample(NamedTuple):
    """A sample as it is stored. `boxes`: (number, 4) of relative ymin, xmin, ymax, xmax."""

    data: bytes
    label: int
    boxes: NDArray[np.float32] | None = None


class Store(Protocol):
    """Where encoded samples come from. `fetch` may wait for a disk or a network; `parse` does not."""

    def __len__(self) -> int: ...

    def fetch(self, sample: int) -> bytes: ...

    def parse(self, sample: int, stored: bytes) -> EncodedSample: ...

    def name(self, sample: int) -> str:
        """Return what error messages call this sample."""
        ...

    def identity(self) -> str:
        """Return a text that differs for different data."""
        ...


# --------------------------------------------------------------------------------------------- TFRecord shards


def open_shards(folder: Path, split: Split, first_label: int, num_classes: int | None) -> Store:
    """Open the shards of a split: its records, in their order."""
    paths = _find_shards(folder, split)
    opened = OpenFiles(_MAX_OPEN)
    with ThreadPoolExecutor(min(_MAX_INDEXING, len(paths))) as pool:
        shards = list(pool.map(lambda path: RecordFile(path, opened), paths))
    store = _Shards(shards, first_label, num_classes)
    if len(store) == 0:
        raise UserError(f"The shards {paths[0].name} … in {paths[0].parent} hold no records")
    return store


class _Shards:
    def __init__(self, shards: list[RecordFile], first_label: int, num_classes: int | None) -> None:
        self._shards = shards
        self._ends = list(accumulate(len(shard) for shard in shards))
        self._first_label = first_label
        self._num_classes = num_classes

    def __len__(self) -> int:
        return self._ends[-1]

    def fetch(self, sample: int) -> bytes:
        shard, record = self._find(sample)
        return shard.read(record)

    def parse(self, sample: int, stored: bytes) -> EncodedSample:
        try:
            features = parse_example(stored)
        except ValueError as error:
            raise UserError(f"{self.name(sample)} cannot be used: {error}") from None
        data = next(iter(features.get("image/encoded", ())), None)
        label = next(iter(features.get("image/class/label", ())), None)
        if not isinstance(data, bytes) or not isinstance(label, int):
            lacking = "image/class/label" if isinstance(data, bytes) else "image/encoded"
            raise UserError(f"{self.name(sample)} cannot be used: it has no {lacking}")
        last = None if self._num_classes is None else self._first_label + self._num_classes - 1
        if label < self._first_label or (last is not None and label > last):
            allowed = f"labels {self._first_label} … {'' if last is None else last}".rstrip()
            raise UserError(f"{self.name(sample)} has the label {label}, but {allowed} are expected")
        sides = [np.array(list(features.get(key, ())), np.float32) for key in _BOX_KEYS]
        if len({len(side) for side in sides}) != 1:
            raise UserError(f"{self.name(sample)} cannot be used: its bounding boxes are incomplete")
        return EncodedSample(data, label - self._first_label, np.stack(sides, axis=-1) if len(sides[0]) else None)

    def name(self, sample: int) -> str:
        shard, record = self._find(sample)
        return f"Record {record} (counted from 0) of {shard.path}"

    def identity(self) -> str:
        lines = []
        for shard in self._shards:
            status = shard.path.stat()
            lines.append(f"{shard.path.absolute()}\x1f{status.st_size}\x1f{status.st_mtime_ns}")
        return "\n".join(lines)

    def _find(self, sample: int) -> tuple[RecordFile, int]:
        number = bisect_right(self._ends, sample)
        return self._shards[number], sample - (self._ends[number - 1] if number else 0)


def _find_shards(folder: Path, split: Split) -> list[Path]:
    """Return all shards of a split in their order, from the folder itself or from one with the split's name."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder} to read images from")
    names = _SPLIT_NAMES[split]
    for name in names:
        pattern = re.compile(rf"{name}-(\d+)-of-(\d+)")
        for place in (folder, folder / name):
            entries = place.iterdir() if place.is_dir() else ()
            found = [(match, path) for path in entries if (match := pattern.fullmatch(path.name))]
            if found:
                return _complete({int(match[1]): path for match, path in found}, {match[2] for match, _ in found})
    shape = " or ".join(f"{name}-00000-of-…" for name in names)
    raise UserError(f"There are no shards called {shape} in {folder}")


def _complete(found: dict[int, Path], totals: set[str]) -> list[Path]:
    first = found[min(found)]
    if len(totals) > 1:
        raise UserError(
            f"{first.parent} holds shards of several data sets (of {' and of '.join(sorted(totals))}): keep one of them"
        )
    (total,) = totals
    lacking = [number for number in range(int(total)) if number not in found]
    if lacking or len(found) > int(total):
        what = f"shard {lacking[0]} is missing" if lacking else "there are more"
        raise UserError(f"{first.parent} should hold {int(total):,} shards like {first.name}, but {what}")
    return [found[number] for number in range(int(total))]


# --------------------------------------------------------------------------------------------- folders of files


def open_folders(
    folder: Path, split: Split, num_classes: int | None, valid_folder: Path | None = None
) -> tuple[Store, tuple[str, ...]]:
    """Open the files of a split, sorted by class and name; return them with the names of all classes."""
    elsewhere = valid_folder if split != "train" else None
    for needed in filter(None, (folder, elsewhere)):
        if not needed.is_dir():
            raise UserError(f"There is no folder {needed} to read images from")
    place = elsewhere or split_folder(folder, split)
    if place is None:
        names = " or ".join(_FOLDER_NAMES[split])
        raise UserError(f"There is no folder called {names} in {folder}{'' if split == 'train' else _ADVICE}")
    train = split_folder(folder, "train") or place
    classes = _class_names(train)
    if num_classes is not None and len(classes) > num_classes:
        raise UserError(f"{train} holds {len(classes):,} classes, but {num_classes:,} are expected")
    own = classes if place == train else _class_names(place)
    unknown = sorted(set(own) - set(classes))
    if unknown:
        raise UserError(f"{place} holds a class {unknown[0]}, which {train} does not have")
    store = _Files(place, own, {name: number for number, name in enumerate(classes)})
    return store, tuple(classes)


class _Files:
    def __init__(self, place: Path, classes: list[str], numbers: Mapping[str, int]) -> None:
        self._place = place
        self._classes = classes
        self._names: list[str] = []
        self._labels: list[int] = []
        for name in classes:
            files = sorted(_files(place / name))
            if not files:
                raise UserError(f"There are no images ({', '.join(_SUFFIXES)}) in {place / name}")
            self._names += files
            self._labels += [numbers[name]] * len(files)
        self._folders = {numbers[name]: name for name in classes}

    def __len__(self) -> int:
        return len(self._names)

    def fetch(self, sample: int) -> bytes:
        path = self._path(sample)
        try:
            return read_limited(path, _IMAGE_BYTES)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {system_reason(error)}") from None

    def parse(self, sample: int, stored: bytes) -> EncodedSample:
        return EncodedSample(stored, self._labels[sample])

    def name(self, sample: int) -> str:
        return str(self._path(sample))

    def identity(self) -> str:
        # Not the times of the files themselves: reading those of millions takes minutes.
        folders = [f"{self._place / name}\x1f{(self._place / name).stat().st_mtime_ns}" for name in self._classes]
        return "\n".join([str(self._place.absolute()), *folders, *self._names])

    def _path(self, sample: int) -> Path:
        return self._place / self._folders[self._labels[sample]] / self._names[sample]


def split_folder(folder: Path, split: Split) -> Path | None:
    """Return the folder of a split's classes, by the first of its names that there is."""
    return next((folder / name for name in _FOLDER_NAMES[split] if (folder / name).is_dir()), None)


def _class_names(place: Path) -> list[str]:
    names = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise UserError(f"{place} should hold one folder of images per class, but holds no folders")
    return names


def _files(place: Path) -> Iterator[str]:
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith("."):
                    yield entry.name
    except OSError as error:
        raise UserError(f"{place} cannot be read: {system_reason(error)}") from None


# --------------------------------------------------------------------------------------------- caches


def cached_fetch(store: Store, cache: Cache) -> Callable[[int], bytes]:
    """Return `store.fetch`, or a version of it that caches its results."""
    if cache == "none":
        return store.fetch
    return (_MemoryCache(store) if cache == "memory" else _DiskCache(store)).fetch


class _MemoryCache:
    """Keeps in memory what has been fetched once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cached: list[bytes | None] = [None] * len(store)

    def fetch(self, sample: int) -> bytes:
        stored = self._cached[sample]
        if stored is None:
            stored = self._cached[sample] = self._store.fetch(sample)
        return stored


class _DiskCache:
    """Keeps in one file of the cache folder what has been fetched once, for this run and later ones.

    An index beside it has a row per sample: its offset, length and CRC-32C. A row is written after its data and trusted
    only if the data matches, so a killed run, a full disk or another process that adds to the same file at the same
    time cost a second copy of a sample at worst.
    """

    _ROW = struct.Struct("<QII")

    def __init__(self, store: Store) -> None:
        self._store = store
        name = hashlib.blake2b(os.fsencode(store.identity()), digest_size=12).hexdigest()
        path = cache_folder("images") / f"{name}.data"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Read and written by system calls, not mapped: writing to a map on a full disk kills the process.
            self._index = os.open(path.with_suffix(".index"), flags, 0o644)
            weakref.finalize(self, os.close, self._index)
            self._data = os.open(path, flags | os.O_APPEND, 0o644)
            weakref.finalize(self, os.close, self._data)
        self._adding = threading.Lock()
        self._full = False

    def fetch(self, sample: int) -> bytes:
        row = os.pread(self._index, self._ROW.size, sample * self._ROW.size)
        offset, length, crc = self._ROW.unpack(row) if len(row) == self._ROW.size else (0, 0, 0)
        if length and offset + length <= os.fstat(self._data).st_size:
            stored = os.pread(self._data, length, offset)
            if len(stored) == length and google_crc32c.value(stored) == crc:
                return stored
        stored = self._store.fetch(sample)
        with self._adding:
            if not self._full:
                self._full = not self._add(sample, stored)
        return stored

    def _add(self, sample: int, stored: bytes) -> bool:
        """Add a sample to the file; return False if there is no room, and it will be read from its store again."""
        try:
            if os.write(self._data, stored) < len(stored):
                return False
            # Appended after whatever others append; this descriptor's own position says where that is.
            offset = os.lseek(self._data, 0, os.SEEK_CUR) - len(stored)
            row = self._ROW.pack(offset, len(stored), google_crc32c.value(stored))
            return os.pwrite(self._index, row, sample * self._ROW.size) == len(row)
        except OSError:
            return False
