"""TFRecord files and the `Example` messages in them, read and written without TensorFlow.

A file is one record after the other, little-endian, each number and each record with a masked CRC-32C behind it:

    uint64 length | uint32 CRC of the length | data | uint32 CRC of the data

`RecordFile` reads any record by its number and checks its CRC every time. Where the records are is found once by
following the lengths, and cached. Called by `data/images/stores.py` and workloads whose data comes in this form.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from numpy.typing import NDArray

from podium.data.formats.npy import read_npy
from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import open_regular
from podium.machine.cache_folder import cache_folder

_HEAD, _FOOT = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_AGAIN = "fetch or copy it again"

#: the values of one feature
Values = Sequence[bytes] | Sequence[int] | Sequence[float]


def masked_crc(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`, rotated and shifted: a CRC over bytes that hold CRCs would otherwise be weak."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class OpenFiles:
    """Files cached open for reading; when there are too many, the least recently used one is closed."""

    def __init__(self, max_open: int) -> None:
        # A file that another thread is still reading is closed when that thread is done.
        self._open = lru_cache(max_open)(_OpenFile)

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes from `offset`: fewer only if the file ends before."""
        try:
            return self._open(path).read(offset, num_bytes)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self._number = -1
        with open_regular(path) as file:
            self._number = os.dup(file.fileno())

    def read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._number, num_bytes, offset)
        while len(data) < num_bytes and (more := os.pread(self._number, num_bytes - len(data), offset + len(data))):
            data += more
        return data

    def __del__(self) -> None:
        if self._number >= 0:
            os.close(self._number)


class RecordFile:
    """The records of one file by number, readable from any thread."""

    def __init__(self, path: Path, opened: OpenFiles | None = None) -> None:
        self.path = path
        self._opened = opened or OpenFiles(1)
        #: where the data of each record begins, and how long it is
        self.offsets, self.lengths = index_records(path)

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> bytes:
        """Read the data of one record and check its CRC."""
        length = int(self.lengths[number])
        whole = self._opened.read(self.path, int(self.offsets[number]), length + _FOOT.size)
        if len(whole) < length + _FOOT.size:
            raise _damaged(self.path, number, "the file ends inside it")
        data = whole[:length]
        if _FOOT.unpack_from(whole, length)[0] != masked_crc(data):
            raise _damaged(self.path, number, "its data does not match its checksum")
        return data


# --------------------------------------------------------------------------------------------- where records lie


def index_records(path: Path) -> NDArray[np.int64]:
    """Return (2, records): where the data of each record of a file begins, and how long it is.

    Cached for the file as it is now: if its size or modification time changes, the index is built again.
    """
    try:
        status = path.stat()
        cached = _index_path(path, status)
        index = _cached_index(cached, status.st_size)
        if index is None:
            index = build_index(path, status.st_size)
            with suppress(OSError):  # without a writable cache, the next run builds the index again
                _write_cache(cached, index)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None
    return index


def _index_path(path: Path, status: os.stat_result) -> Path:
    text = f"{path.absolute()}\x1f{status.st_size}\x1f{status.st_mtime_ns}"
    return cache_folder("index") / f"{hashlib.blake2b(os.fsencode(text), digest_size=12).hexdigest()}.npy"


def _cached_index(cached: Path, num_bytes: int) -> NDArray[np.int64] | None:
    """Return the cached index if it is valid: its records must follow one another up to the end of the file."""
    try:
        index = read_npy(cached)
    except (OSError, ValueError):
        return None
    if index.dtype != np.int64 or index.ndim != 2 or len(index) != 2:
        return None
    starts = np.append(index[0] - _HEAD.size, num_bytes)
    ends = np.concatenate([[0], index.sum(axis=0) + _FOOT.size])
    return index if np.array_equal(starts, ends) and (index[1] >= 0).all() else None


def build_index(path: Path, num_bytes: int) -> NDArray[np.int64]:
    file = _OpenFile(path)
    places: list[tuple[int, int]] = []
    place = 0
    while place < num_bytes:
        head = file.read(place, _HEAD.size)
        if len(head) < _HEAD.size:
            raise _damaged(path, len(places), "the file ends inside its header")
        length, crc = _HEAD.unpack(head)
        if masked_crc(head[: _LENGTH.size]) != crc:
            reason = "its length does not match its checksum" if places else "this is not a TFRecord file"
            raise _damaged(path, len(places), reason)
        places.append((place + _HEAD.size, length))
        place += _HEAD.size + length + _FOOT.size
    if place > num_bytes:
        raise _damaged(path, len(places) - 1, f"the file ends {place - num_bytes:,} bytes too early")
    return np.array(places, np.int64).reshape(-1, 2).T.copy()


def _write_cache(cached: Path, index: NDArray[np.int64]) -> None:
    cached.parent.mkdir(parents=True, exist_ok=True)
    aside = cached.with_name(f"{cached.stem}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            np.save(file, index)
        aside.replace(cached)
    finally:
        aside.unlink(missing_ok=True)


def _damaged(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path} is damaged at record {number} (counted from 0): {reason}; {_AGAIN}")


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Write a file of records under a temporary name, then rename it; return how many there are."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    with writing(path):
        try:
            with aside.open("wb") as file:
                for data in records:
                    length = _LENGTH.pack(len(data))
                    file.write(length + _FOOT.pack(masked_crc(length)))
                    file.write(data)
                    file.write(_FOOT.pack(masked_crc(data)))
                    count += 1
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return count


# --------------------------------------------------------------------------------------------- what is in a record


def parse_example(data: bytes) -> dict[str, Values]:
    """Return the features of an `Example` by name; raise ValueError if `data` is none. Values are read on use."""
    example = _Example()
    try:
        example.ParseFromString(data)
    except message.DecodeError:
        raise ValueError("it holds no Example message") from None
    features: dict[str, Values] = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        features[name] = getattr(feature, kind).value if kind else ()
    return features


def build_example(features: Mapping[str, Values]) -> bytes:
    """Return an `Example` as bytes; each feature is a sequence of bytes, integers or floats."""
    example = _Example()
    for name, values in features.items():
        first = next(iter(values), None)
        kind = "bytes_list" if isinstance(first, bytes) else "float_list" if isinstance(first, float) else "int64_list"
        getattr(example.features.feature[name], kind).value.extend(values)
    return example.SerializeToString(deterministic=True)


def _example_type() -> Any:
    """Return the message type, built from its published definition, in a descriptor pool of its own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="podium/example.proto", package="tensorflow", syntax="proto3")

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    lists = [("bytes", field.TYPE_BYTES), ("float", field.TYPE_FLOAT), ("int64", field.TYPE_INT64)]
    for number, (name, kind) in enumerate(lists, start=1):
        values = file.message_type.add(name=f"{name.title()}List")
        values.field.add(name="value", number=1, label=field.LABEL_REPEATED, type=kind)
        _add_message(feature, f"{name}_list", number, values.name).oneof_index = 0

    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    _add_message(entry, "value", 2, "Feature")
    _add_message(features, "feature", 1, "Features.FeatureEntry").label = field.LABEL_REPEATED

    _add_message(file.message_type.add(name="Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _add_message(
    owner: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str
) -> descriptor_pb2.FieldDescriptorProto:
    field = descriptor_pb2.FieldDescriptorProto
    return owner.field.add(
        name=name, number=number, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE, type_name=f".tensorflow.{kind}"
    )


_Example = _example_type()
