"""`podium predict --input`: new samples in a file that anybody may have made."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.data.formats.array_files import read_arrays
from podium.errors import UserError
from tests.support.hostile import NO_FILES, Tally, attack, check_sentence, damaged, no_hang, replace_by
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def bytes_of(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def hdf5_bytes() -> bytes:
    def write(buffer: io.BytesIO) -> None:
        with h5py.File(buffer, "w") as file:
            file["x"] = ROWS
            file.create_dataset("y", data=ROWS, chunks=(1, 2), compression="gzip")

    return bytes_of(write)


FILES = {
    ".npz": [bytes_of(lambda file: np.savez(file, x=ROWS)), bytes_of(lambda file: np.savez_compressed(file, x=ROWS))],
    ".npy": [bytes_of(lambda file: np.save(file, ROWS))],
    ".h5": [hdf5_bytes()],
    ".csv": [b"a,b,c,d\n0,1,2,3\n4,5,6,7\n", b"0,1,2,3\n4,5,6,7\n"],
}


def refused(path: Path) -> str:
    with no_hang(), pytest.raises(UserError) as error:
        read_arrays(path)
    check_sentence(str(error.value))
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", FILES)
def test_whole_files_give_their_numbers(tmp_path, kind):
    path = tmp_path / f"new{kind}"
    for content in FILES[kind]:
        path.write_bytes(content)
        arrays = read_arrays(path)
        expected = ROWS[:2] if kind == ".csv" else ROWS
        assert all(np.array_equal(array, expected) for array in arrays.values())
        assert list(arrays) == {".npz": ["x"], ".h5": ["x", "y"]}.get(kind, [""])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_give_a_sentence_or_numbers(tmp_path, kind):
    tally, path = Tally(f"predict --input {kind}"), tmp_path / f"new{kind}"

    @attack(200)
    @given(damaged(FILES[kind], 200), st.booleans())
    def try_one(content: bytes, cut: bool) -> None:
        path.write_bytes(content[: len(content) // 2] if cut else content)
        tally.refused(lambda: read_arrays(path), path)

    try_one()
    tally.report()


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("ending", FILES)
def test_what_is_no_file_is_told_at_once(tmp_path, ending, kind):
    replace_by(tmp_path / f"new{ending}", kind)
    refused(tmp_path / f"new{ending}")


def test_archives_that_unpack_to_more_than_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("podium.data.formats.array_files.available_bytes", lambda: 10**6)
    np.savez_compressed(tmp_path / "new.npz", x=np.zeros((2000, 1000), np.float32))
    assert (tmp_path / "new.npz").stat().st_size < 10**5
    assert "needs about 0.0 GB of memory, more than there is" in refused(tmp_path / "new.npz")
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file.create_dataset("x", (10**6, 10**6), "f4", chunks=(1, 10**4), compression="gzip")
    assert "needs about 4,000.0 GB" in refused(tmp_path / "new.h5")


def test_an_archive_that_is_locked_or_holds_objects_is_one_sentence(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{}, []], dtype=object))
    refused(tmp_path / "objects.npz")
    content = bytearray(FILES[".npz"][0])
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # "needs a password"
        content[content.index(mark) + offset] |= 1
    (tmp_path / "locked.npz").write_bytes(content)
    refused(tmp_path / "locked.npz")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
    refused(tmp_path / "other.npz")


def test_numbers_of_other_files_are_refused(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = ROWS
    layout = h5py.VirtualLayout((3, 4), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3, 4))
    made: dict[str, Callable[[h5py.File], object]] = {
        "link": lambda file: file.__setitem__("x", h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")),
        "soft": lambda file: (
            file.__setitem__("away", h5py.ExternalLink(str(tmp_path / "other.h5"), "/")),
            file.__setitem__("x", h5py.SoftLink("/away/x")),
        ),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
        "storage": lambda file: file.create_dataset(
            "x", (3, 4), "f4", external=[(str(tmp_path / "other.h5"), 0, h5py.h5f.UNLIMITED)]
        ),
    }
    for name, write in made.items():
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            write(file)
        assert "only numbers in the file itself are read" in refused(path)


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path):
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file["x"], file["gone"], file["words"] = ROWS, h5py.SoftLink("/not/there"), ["a", "b"]
    assert list(read_arrays(tmp_path / "new.h5")) == ["x"]


def test_no_samples_and_a_file_in_the_way_are_told(tmp_path):
    done = podium_here("train", *TINY["mnist"], "train.length=1up", "schedule.warmup=0", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    np.save(tmp_path / "none.npy", np.zeros((0, 1, 28, 28), np.float32))
    words = ["predict", tmp_path / "run", "--input", tmp_path / "none.npy", "--output"]
    assert_user_error(podium_here(*words, tmp_path / "out.npz"), "none.npy holds no samples")
    assert not (tmp_path / "out.npz").exists()
    (tmp_path / "out.npz").write_text("mine")
    done = podium_here(*words, tmp_path / "out.npz")
    assert_user_error(done, "out.npz already exists")
    assert "predicting" not in done.stderr
