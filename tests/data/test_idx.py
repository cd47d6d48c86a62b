"""IDX files: what is read back, and the one sentence for each way a file can be wrong."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from podium.data.formats.idx import read_idx, write_idx
from podium.errors import UserError


def _example(dtype: str) -> np.ndarray:
    return (np.arange(2 * 3 * 4) - 5).astype(dtype).reshape(2, 3, 4)


def _saved(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a-idx3", "a-idx3.gz"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("memory_map", [False, True])
def test_every_type_is_read_back_plain_and_compressed(tmp_path, name, dtype, memory_map):
    array = _example(dtype)
    write_idx(tmp_path / name, array)
    read = read_idx(tmp_path / name, memory_map=memory_map)
    assert np.array_equal(read, array)
    assert read.dtype.newbyteorder("=") == array.dtype
    if not memory_map:
        assert read.dtype.isnative


def test_the_layout_is_the_published_one(tmp_path):
    content = bytes.fromhex("00 00 0b 02 00 00 00 02 00 00 00 01 01 02 ff fe")
    assert read_idx(_saved(tmp_path / "x", content)).tolist() == [[258], [-2]]


def test_memory_map_maps_a_plain_file_read_only(tmp_path):
    write_idx(tmp_path / "x", _example("u1"))
    mapped = read_idx(tmp_path / "x", memory_map=True)
    assert isinstance(mapped, np.memmap)
    assert not mapped.flags.writeable


def test_compression_is_seen_in_the_content_not_the_name(tmp_path):
    write_idx(tmp_path / "x.gz", _example("u1"))
    (tmp_path / "x.gz").rename(tmp_path / "x")
    assert np.array_equal(read_idx(tmp_path / "x"), _example("u1"))


def test_an_empty_array_is_read(tmp_path):
    for name in ("x", "x.gz"):
        write_idx(tmp_path / name, np.empty((0, 28, 28), np.uint8))
        assert read_idx(tmp_path / name, memory_map=True).shape == (0, 28, 28)


def _sentence(path: Path, **needs) -> str:
    with pytest.raises(UserError) as caught:
        read_idx(path, **needs)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    return sentence


def test_a_missing_file_is_named(tmp_path):
    assert "There is no file" in _sentence(tmp_path / "absent")


def test_a_folder_is_not_a_file(tmp_path):
    assert "cannot be read" in _sentence(tmp_path)


@pytest.mark.parametrize(
    "head", [b"\x01\x00\x08\x01", b"\x00\x00\x07\x01", b"\x00\x00\x08\x00", b"\x89PNG", b"\x80\x04cos"]
)
def test_another_kind_of_file_is_refused(tmp_path, head):
    assert "is not an IDX file" in _sentence(_saved(tmp_path / "x", head + bytes(64)))


@pytest.mark.parametrize("memory_map", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 3, 10, 20, 39])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, num_bytes, memory_map):
    write_idx(tmp_path / "whole", _example("u1"))
    content = (tmp_path / "whole").read_bytes()
    assert len(content) == 40
    assert "truncated" in _sentence(_saved(tmp_path / "x", content[:num_bytes]), memory_map=memory_map)


@pytest.mark.parametrize("memory_map", [False, True])
def test_bytes_after_the_end_are_refused(tmp_path, memory_map):
    write_idx(tmp_path / "x", _example("u1"))
    path = _saved(tmp_path / "x", (tmp_path / "x").read_bytes() + b"\0")
    assert "longer than" in _sentence(path, memory_map=memory_map)


def test_truncated_and_damaged_gzip_are_refused(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, (50, 28, 28)).astype(np.uint8)
    write_idx(tmp_path / "whole.gz", numbers)
    content = (tmp_path / "whole.gz").read_bytes()
    for num_bytes in (2, 11, len(content) // 2, len(content) - 5):
        assert "gzip data ends" in _sentence(_saved(tmp_path / "cut.gz", content[:num_bytes]))
    flipped = bytearray(content)
    flipped[-6] ^= 0xFF  # the stored checksum
    assert "not a valid gzip file" in _sentence(_saved(tmp_path / "sum.gz", bytes(flipped)))
    garbage = content[:10] + b"\xff" * 100
    assert "not a valid gzip file" in _sentence(_saved(tmp_path / "garbage.gz", garbage))


def test_gzip_that_unpacks_to_too_little_is_truncated(tmp_path):
    write_idx(tmp_path / "whole", _example("u1"))
    content = gzip.compress((tmp_path / "whole").read_bytes()[:-1])
    assert "truncated" in _sentence(_saved(tmp_path / "x.gz", content))


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_a_header_that_promises_terabytes_asks_for_no_memory(tmp_path, name):
    content = struct.pack(">HBB3I", 0, 0x0E, 3, 2**31, 2**31, 2**31) + bytes(100)
    content = gzip.compress(content) if name.endswith(".gz") else content
    assert "truncated" in _sentence(_saved(tmp_path / name, content))


def test_another_shape_or_type_than_needed_is_refused(tmp_path):
    write_idx(tmp_path / "x", _example("u1"))
    assert "2 × 3 × 4, but any × 28 × 28" in _sentence(tmp_path / "x", shape=(None, 28, 28))
    assert "but any is needed" in _sentence(tmp_path / "x", shape=(None,))
    assert "type uint8, but float32" in _sentence(tmp_path / "x", dtype=np.float32)
    write_idx(tmp_path / "y", _example("i4"))
    assert read_idx(tmp_path / "y", shape=(None, 3, 4), dtype=np.int32).shape == (2, 3, 4)
