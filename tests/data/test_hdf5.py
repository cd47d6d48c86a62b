"""Samples of HDF5 files: the same numbers however they are read, and one clear sentence for every bad file."""

import gc
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from podium.data.source import empty_buffers
from podium.data.sources.hdf5 import Hdf5Array, Hdf5Source, budget_bytes, widen
from podium.errors import UserError

NUM_SAMPLES, BINS, PROBES = 40, 12, 4
ARRAYS = {"frames": Hdf5Array("frames", (None, PROBES)), "target": Hdf5Array("target", (3,))}
SAMPLES = np.array([7, 0, 39, 7, 12, 11, 13, 0], np.int64)


def numbers(dtype):
    rng = np.random.default_rng(0)
    frames = rng.normal(-65, 30, (NUM_SAMPLES, BINS, PROBES)).astype(dtype)
    return frames, rng.uniform(-1, 1, (NUM_SAMPLES, 3)).astype(np.float32)


def write(path: Path, dtype="float16", **storage):
    frames, target = numbers(dtype)
    with h5py.File(path, "w") as file:
        file.create_dataset("frames", data=frames, **storage)
        file.create_dataset("target", data=target)
    return path


def gathered(source, samples=SAMPLES):
    out = empty_buffers(source.fields, len(samples))
    source.gather(samples, out)
    return out


STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (3, BINS, PROBES)},
    "chunked across samples": {"chunks": (5, 4, 2)},
    "compressed": {"chunks": (7, BINS, PROBES), "compression": "gzip"},
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("storage", STORAGE.values(), ids=STORAGE)
@pytest.mark.parametrize("columns", [None, (0, 1), (3, 1)])
def test_streamed_equals_resident_bit_for_bit(tmp_path, dtype, storage, columns):
    path = write(tmp_path / "a.h5", dtype, **storage)
    arrays = {**ARRAYS, "frames": Hdf5Array("frames", (None, PROBES), columns)}
    resident, streamed = Hdf5Source(path, arrays), Hdf5Source(path, arrays, memory_budget=0)
    assert resident.resident
    assert not streamed.resident
    assert streamed.resident_bytes == 0
    frames, target = numbers(dtype)
    expected = frames if columns is None else frames[..., columns]
    for source in (resident, streamed):
        out = gathered(source)
        assert out["frames"].dtype == out["target"].dtype == np.float32
        np.testing.assert_array_equal(out["frames"], expected[SAMPLES].astype(np.float32))
        np.testing.assert_array_equal(out["target"], target[SAMPLES])


def test_small_arrays_stay_in_memory_when_large_ones_exceed_the_budget(tmp_path):
    path = write(tmp_path / "a.h5")
    target_bytes, frames_bytes = NUM_SAMPLES * 3 * 4, NUM_SAMPLES * BINS * PROBES * 2
    source = Hdf5Source(path, ARRAYS, memory_budget=frames_bytes)
    assert source.resident_bytes == target_bytes
    assert not source.resident
    source = Hdf5Source(path, ARRAYS, memory_budget=frames_bytes + target_bytes)
    assert source.resident_bytes == frames_bytes + target_bytes
    assert source.resident


@pytest.mark.parametrize("budget", [None, 0])
def test_max_samples_takes_the_first_ones(tmp_path, budget):
    path = write(tmp_path / "a.h5")
    source = Hdf5Source(path, ARRAYS, max_samples=9, memory_budget=budget)
    assert len(source) == 9
    assert source.num_stored == NUM_SAMPLES
    np.testing.assert_array_equal(gathered(source, np.arange(9))["target"], numbers("float16")[1][:9])
    assert len(Hdf5Source(path, ARRAYS, max_samples=1000)) == NUM_SAMPLES


def test_rows_go_into_parts_of_larger_buffers(tmp_path):
    path = write(tmp_path / "a.h5")
    for source in (Hdf5Source(path, ARRAYS), Hdf5Source(path, ARRAYS, memory_budget=0)):
        buffers = {name: np.full((20, *field.shape), 5, field.dtype) for name, field in source.fields.items()}
        source.gather(SAMPLES, {name: buffer[4 : 4 + len(SAMPLES)] for name, buffer in buffers.items()})
        np.testing.assert_array_equal(buffers["target"][4 : 4 + len(SAMPLES)], gathered(source)["target"])
        assert (buffers["frames"][:4] == 5).all()
        assert (buffers["frames"][4 + len(SAMPLES) :] == 5).all()


def test_numbers_not_aligned_in_the_file_are_read_correctly(tmp_path):
    path = tmp_path / "a.h5"
    frames, target = numbers("float32")
    with h5py.File(path, "w", libver="latest") as file:
        for odd in range(1, 4):  # bytes in front push the arrays off their alignment
            file.create_dataset(f"odd{odd}", data=np.zeros(odd, np.uint8))
        file.create_dataset("frames", data=frames)
        file.create_dataset("target", data=target)
    out = gathered(Hdf5Source(path, ARRAYS, memory_budget=0))
    np.testing.assert_array_equal(out["frames"], frames[SAMPLES])
    np.testing.assert_array_equal(out["target"], target[SAMPLES])


def test_widening_keeps_every_value_and_starts_no_threads():
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    rows = np.tile(every, 3).reshape(3, 16, -1)
    out = np.empty(rows.shape, np.float32)
    threads = torch.get_num_threads()
    thread = threading.Thread(target=widen, args=(rows, out))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == threads
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, rows.astype(np.float32))


def test_files_are_closed_with_their_source(tmp_path):
    path = write(tmp_path / "a.h5")
    source = Hdf5Source(path, ARRAYS, memory_budget=0)
    gathered(source)
    del source
    gc.collect()
    with h5py.File(path, "r+"):
        pass


def test_budget_in_gigabytes():
    assert budget_bytes(None) is None
    assert budget_bytes(0.5) == 500_000_000
    assert budget_bytes(0) == 0


def fails(path, arrays=ARRAYS):
    with pytest.raises(UserError) as caught:
        Hdf5Source(path, arrays)
    text = str(caught.value)
    assert str(path) in text
    assert not text.endswith(".")
    assert "\n" not in text
    return text


def test_missing_file(tmp_path):
    assert "There is no file" in fails(tmp_path / "none.h5")


def test_folder_instead_of_a_file(tmp_path):
    assert "cannot be read" in fails(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all, only some text\n" * 50])
def test_file_that_is_not_hdf5(tmp_path, content):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    assert "is not an HDF5 file" in fails(path)


@pytest.mark.parametrize("part", [0.2, 0.6, 0.99])
def test_truncated_file(tmp_path, part):
    path = write(tmp_path / "a.h5")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert "truncated" in fails(path)


def test_damaged_chunk_is_told_when_read(tmp_path):
    path = write(tmp_path / "a.h5", chunks=(10, BINS, PROBES), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["frames"].id.get_chunk_info(1)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(data)
    assert "damaged" in fails(path)
    with pytest.raises(UserError, match="damaged"):
        gathered(Hdf5Source(path, ARRAYS, memory_budget=0))


def test_missing_dataset_names_what_is_there(tmp_path):
    path = write(tmp_path / "a.h5")
    text = fails(path, {"frames": Hdf5Array("train_frames", (None, PROBES))})
    assert "no dataset 'train_frames'" in text
    assert "frames, target" in text


@pytest.mark.parametrize("shape", [(None, 3), (PROBES, BINS), (None,), (None, None, None)])
def test_wrong_shape_says_found_and_expected(tmp_path, shape):
    path = write(tmp_path / "a.h5")
    text = fails(path, {"frames": Hdf5Array("frames", shape)})
    assert f"has shape ({NUM_SAMPLES}, {BINS}, {PROBES})" in text
    assert "expected (samples, " in text


@pytest.mark.parametrize("dtype", ["int32", "float64", ">f4"])
def test_wrong_type_of_number(tmp_path, dtype):
    path = write(tmp_path / "a.h5", dtype)
    assert "expected float16 or float32" in fails(path)


def test_arrays_of_different_length(tmp_path):
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["target"]
        file["target"] = np.zeros((NUM_SAMPLES - 1, 3), np.float32)
    text = fails(path)
    assert "frames 40" in text
    assert "target 39" in text


def test_no_samples(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["frames"] = np.zeros((0, BINS, PROBES), np.float32)
    assert "holds no samples" in fails(path, {"frames": ARRAYS["frames"]})


def test_columns_that_do_not_exist(tmp_path):
    path = write(tmp_path / "a.h5")
    assert "but column 4 is needed" in fails(path, {"frames": Hdf5Array("frames", (None, PROBES), (0, 4))})
