"""Tensors in a file of the safetensors format, written and read in one pass with their checksum. For checkpoints.

The library's own functions make two copies of everything in memory, and a checksum needs another pass; here bytes go
straight from the tensors to the disk and the digest, without holding Python's lock, so training continues meanwhile
(bench/growth compares both). Any computation for checkpoints slows the training down, so the checksum runs at memory
speed (xxh3: 17 GB/s; sha256: 1.4 GB/s), and files are written to the disk without going through the system's cache.

    8 bytes: length of the header | header: JSON, name -> {dtype, shape, data_offsets} | the tensors' bytes
"""

import fcntl
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from podium.distributed.sharding.gather_tensors import aligned_order
from podium.machine.bounded_files import open_regular, parse_mapping

#: the names of types in safetensors
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_CHUNK_BYTES = 1 << 22
MAX_HEADER_BYTES = 16 << 20
#: the checksum that files are written with, and all that a manifest may contain
CHECKSUM = "xxh3_128"
CHECKSUMS: dict[str, Callable[[], Any]] = {CHECKSUM: xxhash.xxh3_128, "sha256": hashlib.sha256}
#: bypasses the system's cache: one copy less, and nothing to be written back later on the training's cores
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], fetched: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[str, int]:
    """Write tensors of the host and wait until they are on the disk; return (checksum, bytes).

    `fetched` yields the values in `aligned_order` if `tensors` have only names, shapes and types; then only one tensor
    at a time is in memory.
    """
    header, offset = {}, 0
    order = aligned_order(tensors)
    for name in order:
        tensor = tensors[name]
        num_bytes = tensor.numel() * tensor.element_size()
        place = [offset, offset + num_bytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = ((name, tensors[name]) for name in order) if fetched is None else fetched
    head = memoryview(len(text).to_bytes(8, "little") + text)
    return write_synced(path, chain([head], (_bytes_of(tensor) for _, tensor in values)))


def write_synced(path: Path, parts: Iterable[memoryview]) -> tuple[str, int]:
    """Write parts one after the other and wait until they are on the disk; return (checksum, bytes)."""
    digest, size = CHECKSUMS[CHECKSUM](), 0
    with _DirectFile(path) as file:
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):  # a chunk stays in the processor's cache for both uses
                chunk = part[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            size += len(part)
        file.sync()
    return digest.hexdigest(), size


class _DirectFile:
    """A new file, written in whole blocks that bypass the system's cache where the file system supports it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
            self._direct = bool(_DIRECT)
        except OSError:  # not supported, or another error, which the plain call will raise
            self._file = os.open(path, flags, 0o666)
            self._direct = False
        # Aligned to a page, as the disk requires.
        self._block: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), np.uint8)
        self._filled = 0

    def write(self, data: memoryview) -> None:
        while data:
            size = min(len(data), _CHUNK_BYTES - self._filled)
            self._block[self._filled : self._filled + size] = np.frombuffer(data[:size], np.uint8)
            self._filled += size
            data = data[size:]
            if self._filled == _CHUNK_BYTES:
                self._flush()

    def sync(self) -> None:
        """Flush everything to the disk; nothing may be written afterwards."""
        self._use_cache()  # the rest is not a whole block
        self._flush()
        os.fsync(self._file)

    def _flush(self) -> None:
        done = 0
        while done < self._filled:
            try:
                done += os.write(self._file, self._block[done : self._filled].data)
            except OSError:
                if not self._direct:
                    raise
            if done < self._filled:  # refused, or the remainder is not aligned as the disk requires
                self._use_cache()
        self._filled = 0

    def _use_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)
            self._direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)


def tensors_in(data: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the bytes of such a file, without a copy; raise ValueError if it is malformed. Nothing is
    executed."""
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("the file of tensors is cut short")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header of the file of tensors has more than {MAX_HEADER_BYTES:,} bytes")
    header = parse_mapping(data[8 : 8 + length].numpy().tobytes())
    body = data[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, first, last = _entry(name, entry)
        if not 0 <= first <= last <= len(body) or last - first != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{name} lies outside the file")
        part = body[first:last]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:  # a file from another program
            part = part.clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def _entry(name: str, entry: object) -> tuple[torch.dtype, list[int], int, int]:
    """Return (type, shape, first byte, last byte) of a tensor as the header has it; raise ValueError if it has not."""
    fields = entry if isinstance(entry, dict) else {}
    dtype = _TYPES.get(str(fields.get("dtype")))
    shape: Any = fields.get("shape")
    places: Any = fields.get("data_offsets")
    if dtype is None or not _are_sizes(shape) or not _are_sizes(places) or len(places) != 2 or len(shape) > 64:
        raise ValueError(f"the header of the file of tensors does not describe {name[:80]!r}")
    return dtype, shape, places[0], places[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def read_checked(path: Path, checksum: str = CHECKSUM, num_bytes: int | None = None) -> tuple[Tensor, str]:
    """Return (all bytes of a file, their checksum); raise ValueError unless there are `num_bytes`, where given."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if num_bytes is not None and size != num_bytes:
            raise ValueError(f"{path.name} has {size:,} bytes instead of {num_bytes:,}")
        try:
            data = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            raise ValueError(f"{path.name} with its {size:,} bytes does not fit into memory") from None
        digest, view = CHECKSUMS[checksum](), data.numpy().data
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            filled = 0
            while filled < len(chunk):
                count = file.readinto(chunk[filled:])
                if not count:
                    raise ValueError(f"{path.name} is cut short")
                filled += count
            digest.update(chunk)
    return data, digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
