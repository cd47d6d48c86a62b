"""TFRecord files: what others write is read, what is damaged is named, and the index is never believed when stale."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from podium.data.formats import tfrecord
from podium.data.formats.tfrecord import (
    OpenFiles,
    RecordFile,
    build_example,
    index_records,
    parse_example,
    write_records,
)
from podium.errors import UserError

RECORDS = [b"first", b"", b"third" * 1000, bytes(range(256))]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A file of four records, and a cache that nothing else has filled."""
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    assert write_records(tmp_path / "some.tfrecord", RECORDS) == len(RECORDS)
    return tmp_path / "some.tfrecord"


def read_all(path: Path) -> list[bytes]:
    file = RecordFile(path)
    return [file.read(number) for number in range(len(file))]


def sentence(path: Path, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        read_all(path)
    told = str(caught.value)
    assert str(path) in told
    assert "\n" not in told
    assert not told.endswith(".")
    for part in parts:
        assert part in told, told


def test_what_tensorboard_writes_is_read_and_written_alike(path):
    other = path.with_name("other.tfrecord")
    with other.open("wb") as file:
        writer = RecordWriter(file)
        for data in RECORDS:
            writer.write(data)
    assert read_all(other) == RECORDS
    assert other.read_bytes() == path.read_bytes()


def test_records_are_read_in_any_order_by_many_threads(path):
    second = path.with_name("second.tfrecord")
    write_records(second, RECORDS[::-1])
    opened = OpenFiles(1)  # the two files push each other out all the time
    files = [RecordFile(path, opened), RecordFile(second, opened)]
    numbers = np.random.default_rng(0).integers(0, 8, 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda number: files[number // 4].read(number % 4), numbers))
    assert got == [(RECORDS + RECORDS[::-1])[number] for number in numbers]


def test_an_empty_file_holds_no_records(path):
    path.write_bytes(b"")
    assert len(RecordFile(path)) == 0
    assert write_records(path, []) == 0
    assert len(RecordFile(path)) == 0


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    sentence(tmp_path / "absent", "There is no file")
    (tmp_path / "folder").mkdir()
    sentence(tmp_path / "folder", "cannot be read")


def test_a_file_of_something_else_is_told(path):
    path.write_bytes(b"\x89PNG and so on, for long enough")
    sentence(path, "not a TFRecord file")


@pytest.mark.parametrize(
    ("at", "record", "what"),
    [
        (21 + 0, 1, "its length does not match"),
        (21 + 9, 1, "its length does not match"),
        (21 + 16 + 12 + 777, 2, "its data does not match"),
        (12 + 5, 0, "its data does not match"),
    ],
)
def test_a_flipped_bit_is_found_in_whatever_part_of_a_record(path, at, record, what):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)
    sentence(path, f"record {record} ", what)


def test_a_file_cut_anywhere_but_between_records_is_told(path):
    whole = path.read_bytes()
    ends = np.cumsum([16 + len(data) for data in RECORDS]).tolist()
    for cut in [1, 11, 12, 14, 20, 22, 40, 60, 4000, *(end - 1 for end in ends)]:
        path.write_bytes(whole[:cut])
        number = next(number for number, end in enumerate(ends) if cut < end)
        sentence(path, f"record {number} ", "the file ends")
    path.write_bytes(whole[: ends[1]])
    assert read_all(path) == RECORDS[:2]


def test_a_file_cut_after_it_was_indexed_is_told(path):
    file = RecordFile(path)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(UserError, match=r"record 3 .*ends inside"):
        file.read(3)


# ------------------------------------------------------------------------------------------------ the index


@pytest.fixture
def made(monkeypatch) -> list[Path]:
    """Which indices have been made by reading the file."""
    paths: list[Path] = []
    make = tfrecord.build_index

    def counted(path, num_bytes):
        paths.append(path)
        return make(path, num_bytes)

    monkeypatch.setattr(tfrecord, "build_index", counted)
    return paths


def kept() -> Path:
    (found,) = Path(os.environ["PODIUM_CACHE"]).rglob("*.*")
    return found


def test_the_index_is_made_once_and_kept(path, made):
    first = index_records(path)
    assert first.dtype == np.int64
    assert first[1].tolist() == [len(data) for data in RECORDS]
    assert np.array_equal(index_records(path), first)
    assert len(made) == 1
    assert read_all(path) == RECORDS


def test_a_file_that_changed_is_indexed_again(path, made):
    index_records(path)
    before = path.stat()
    write_records(path, RECORDS[::-1])  # as long as it was
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert read_all(path) == RECORDS[::-1]
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["empty", "garbage", "short", "floats", "elsewhere", "fewer", "pickle"])
def test_a_damaged_index_is_made_again(path, made, damage):
    good = index_records(path)
    place = kept()
    if damage in ("empty", "garbage", "short"):
        place.write_bytes({"empty": b"", "garbage": b"?" * 200, "short": place.read_bytes()[:-8]}[damage])
    else:
        changed = {
            "floats": good.astype(np.float64),
            "elsewhere": good + 1,
            "fewer": good[:, :-1],
            "pickle": np.array([{}], object),
        }
        np.save(place, changed[damage])
    assert read_all(path) == RECORDS
    assert len(made) == 2
    assert read_all(path) == RECORDS
    assert len(made) == 2


def test_without_a_cache_that_can_be_written_files_are_read_all_the_same(path, made, monkeypatch):
    monkeypatch.setenv("PODIUM_CACHE", str(path))  # a file where a folder should be
    assert read_all(path) == RECORDS
    assert read_all(path) == RECORDS
    assert len(made) == 2


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_records(tmp_path / "absent" / "x", [b"data"])


# ------------------------------------------------------------------------------------------------ examples


def test_examples_have_the_published_layout():
    data = bytes.fromhex("0a 0c 0a 0a 0a 01 61 12 05 1a 03 0a 01 07")
    assert build_example({"a": [7]}) == data
    assert {name: list(values) for name, values in parse_example(data).items()} == {"a": [7]}


def test_examples_are_read_back():
    features = {"bytes": [b"\x00\xff", b""], "whole": [-1, 2**40], "real": [0.5, -2.0], "none": []}
    got = parse_example(build_example(features))
    assert {name: list(values) for name, values in got.items()} == features


def test_real_numbers_are_single_precision():
    (value,) = parse_example(build_example({"x": [0.1]}))["x"]
    assert value == struct.unpack("<f", struct.pack("<f", 0.1))[0]


def test_what_is_no_example_is_told():
    with pytest.raises(ValueError, match="no Example"):
        parse_example(b"\xff\xff\xff")
