"""Tensors in a file of the safetensors format, written and read in one pass with their checksum. For checkpoints.

The library's own functions make two copies of everything in memory, and a checksum one more pass; here bytes go from
the tensors straight to the disk and the digest, without holding Python's lock, so training goes on beside it
(bench/growth has both).

    8 bytes: length of the header | header: JSON, name -> {dtype, shape, data_offsets} | the tensors' bytes
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

#: safetensors' names of types
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


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The order in which a file holds them: keeps each aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], fetched: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[str, int]:
    """Writes tensors of the host and waits until they are on the disk; returns (sha256, bytes).

    `fetched` gives the values, in `file_order`, where `tensors` say only names, shapes and types: one at a time is in
    memory then.
    """
    header, offset = {}, 0
    order = file_order(tensors)
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
    """Writes parts one after the other and waits until they are on the disk; returns (sha256, bytes)."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):  # a chunk stays in the processor's cache for both
                chunk = part[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
            size += len(part)
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def tensors_in(data: Tensor) -> dict[str, Tensor]:
    """The tensors in the bytes of such a file, without a copy. ValueError where it is none; nothing is executed."""
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("the file of tensors is cut short")
    header = json.loads(data[8 : 8 + length].numpy().tobytes())
    body = data[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
        if not 0 <= first <= last <= len(body) or last - first != dtype.itemsize * torch.Size(shape).numel():
            raise ValueError(f"{name} lies outside of the file")
        part = body[first:last]
        if part.data_ptr() % dtype.itemsize:  # a file that others wrote
            part = part.clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def read_checked(path: Path) -> tuple[Tensor, str]:
    """(all bytes, their sha256)."""
    data = torch.empty(path.stat().st_size, dtype=torch.uint8)
    digest, view = hashlib.sha256(), data.numpy().data
    with path.open("rb", buffering=0) as file:
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
