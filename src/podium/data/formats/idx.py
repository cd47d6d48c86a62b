"""Reads IDX files, the array format MNIST and its relatives are published in, plain or gzip-compressed.

A file is a type code, its dimensions (big-endian) and the numbers themselves: reading one executes nothing.
Called by workloads whose data comes in this form.
"""

import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import open_regular

_TYPES: dict[int, np.dtype] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
_MAX_DIMENSIONS = 32
_GZIP_MAGIC = b"\x1f\x8b"
# Deflate cannot do better than about 1032 to 1, so a header that promises more is damaged; checked first, such a header
# cannot make us allocate terabytes.
_MAX_GZIP_RATIO = 1040


def read_idx(
    path: Path,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: DTypeLike | None = None,
    memory_map: bool = False,
) -> NDArray:
    """Read the array of one IDX file.

    `shape` (None: any size) and `dtype` are what the caller needs; anything else is the user's mistake. Whether the
    file is compressed is decided by its content, not its name. With `memory_map` a plain file is mapped,
    read-only and in the file's byte order; a compressed one is always read whole.
    """
    try:
        with open_regular(path) as raw:
            num_bytes = os.fstat(raw.fileno()).st_size
            compressed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if compressed:
                with gzip.open(raw, "rb") as unpacked:
                    return _read(unpacked, path, shape, dtype, num_bytes * _MAX_GZIP_RATIO)
            return _read(raw, path, shape, dtype, num_bytes, memory_map)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}") from None
    except EOFError:
        raise UserError(f"{path} is truncated: its gzip data ends too early; fetch or copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a valid gzip file ({error}); fetch or copy it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None
    except MemoryError:
        raise UserError(f"{path} is larger than the memory that is left") from None


def write_idx(path: Path, array: NDArray) -> None:
    """Write `array` as an IDX file, compressed if the name ends in `.gz`."""
    wanted = array.dtype.newbyteorder(">")
    code = next((code for code, known in _TYPES.items() if known == wanted), None)
    assert code is not None, f"IDX has no type for {array.dtype}"
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    content = header + np.ascontiguousarray(array, wanted).tobytes()
    # A fixed time stamp: the same array always gives the same file.
    path.write_bytes(gzip.compress(content, compresslevel=6, mtime=0) if path.suffix == ".gz" else content)


def _read(
    stream: io.BufferedReader | gzip.GzipFile,
    path: Path,
    shape: Sequence[int | None] | None,
    dtype: DTypeLike | None,
    max_bytes: int,
    memory_map: bool = False,
) -> NDArray:
    """Read the array of `stream`, which can yield at most `max_bytes`."""
    head = stream.read(4)
    zeros, code, num_dimensions = struct.unpack(">HBB", head) if len(head) == 4 else (0, 0x08, 1)
    if zeros != 0 or code not in _TYPES or not 0 < num_dimensions <= _MAX_DIMENSIONS:
        raise UserError(f"{path} is not an IDX file (it begins with {head.hex(' ')})")
    dimensions = stream.read(4 * num_dimensions)
    if len(dimensions) < 4 * num_dimensions:
        raise UserError(f"{path} is truncated: it ends inside its header; fetch or copy it again")
    found_shape = struct.unpack(f">{num_dimensions}I", dimensions)
    found_dtype = _TYPES[code]
    if dtype is not None and found_dtype != np.dtype(dtype).newbyteorder(">"):
        raise UserError(f"{path} holds numbers of type {found_dtype.name}, but {np.dtype(dtype).name} is needed")
    if shape is not None and not _fits(found_shape, shape):
        raise UserError(f"{path} holds an array of {_sizes(found_shape)}, but {_sizes(shape)} is needed")

    offset = 4 + 4 * num_dimensions
    num_needed = math.prod(found_shape) * found_dtype.itemsize
    if offset + num_needed > max_bytes:
        raise UserError(f"{path} is truncated: its header promises {num_needed:,} bytes; fetch or copy it again")
    if math.prod(size or 1 for size in found_shape) >= 2**60:  # an array without numbers may promise anything
        raise UserError(f"{path} is damaged: its header promises an array of {_sizes(found_shape)}")
    if memory_map and num_needed:
        if offset + num_needed != max_bytes:
            raise _too_long(path, num_needed)
        return np.memmap(path, found_dtype, mode="r", offset=offset, shape=found_shape)

    array = np.empty(found_shape, found_dtype)
    if num_needed:
        view = array.reshape(-1).view(np.uint8).data
        num_read = 0
        while num_read < num_needed and (num_new := stream.readinto(view[num_read:])):
            num_read += num_new
        if num_read < num_needed:
            raise UserError(
                f"{path} is truncated: it holds {num_read:,} of {num_needed:,} bytes; fetch or copy it again"
            )
    # Reading past the end also makes gzip compare its checksum.
    if stream.read(1):
        raise _too_long(path, num_needed)
    return array.astype(found_dtype.newbyteorder("="), copy=False)


def _too_long(path: Path, num_needed: int) -> UserError:
    return UserError(f"{path} is longer than the {num_needed:,} bytes its header promises; fetch or copy it again")


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(w is None or f == w for f, w in zip(found, wanted, strict=True))


def _sizes(shape: Sequence[int | None]) -> str:
    return " × ".join("any" if size is None else str(size) for size in shape)
