"""HDF5 files: all readers see the same numbers in any layout, nothing is read from other files, damage is told."""

import os
import tempfile
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.data.source import empty_buffers
from podium.data.sources.hdf5 import Hdf5Array, Hdf5Source
from podium.data.volumes.crops import VolumeArray, VolumeCrops
from podium.errors import UserError
from tests.support.hostile import Tally, attack, damaged, no_hang
from tests.support.processes import assert_user_error, podium_here

READ = "only numbers in the file itself are read"


def rows_of(path: Path, num_samples: int, width: int, budget: int | None) -> np.ndarray:
    source = Hdf5Source(path, {"x": Hdf5Array("x", (width,))}, memory_budget=budget)
    out = empty_buffers(source.fields, num_samples)
    source.gather(np.arange(num_samples)[::-1].copy(), out)
    return out["x"][::-1]


def volume_of(path: Path, size: int, mode: str) -> np.ndarray:
    crops = VolumeCrops(path, {"x": VolumeArray("x", 1)}, size, 3, seed=0, mode=mode, fixed=True, threads=1)
    out = empty_buffers(crops.fields, 3)
    crops.gather(np.arange(3), out)
    return out["x"]


# --------------------------------------------------------------------------------- the same numbers however they lie


@st.composite
def layouts(draw, kind: str, shape: tuple[int, ...]):
    """A function that writes a dataset `x` of that shape into a new file in one of many ways."""
    dtype = draw(st.sampled_from(["<f4", "<f2", "odd", "<f4", "<f2", ">f4", ">f2", "<f8", "<i4"]))
    chunks = tuple(draw(st.integers(1, size)) for size in shape)
    filters = draw(st.sampled_from([{}, {"compression": "gzip"}, {"compression": "lzf", "shuffle": True}]))
    filters |= draw(st.sampled_from([{}, {"fletcher32": True}]))
    fill = draw(st.sampled_from([0.0, 7.0, -1.5]))
    pad, user = draw(st.integers(0, 5)), draw(st.sampled_from([0, 0, 512, 1024]))
    cut = draw(st.integers(1, max(1, shape[0] - 1)))
    seed = draw(st.integers(0, 99))

    def write(path: Path) -> None:
        array = np.random.default_rng(seed).normal(size=shape)
        stored = h5py.h5t.py_create(np.dtype("<f4" if dtype == "odd" else dtype))
        if dtype == "odd":  # 32 bits, but not those of IEEE: h5py calls it float32 all the same
            stored = stored.copy()
            stored.set_fields(30, 23, 7, 0, 23)  # of sign, exponent and mantissa
            stored.set_ebias(63)
            stored.set_precision(31)
        kept = h5py.Datatype(stored)
        with h5py.File(path, "w", userblock_size=user, libver="latest") as file:
            if pad:
                file["pad"] = np.zeros(pad, np.uint8)
            if kind == "virtual":
                layout = h5py.VirtualLayout(shape, np.dtype("<f4" if dtype == "odd" else dtype))
                for name, part in (("a", slice(0, cut)), ("b", slice(cut, None))):
                    if len(array[part]):
                        file.create_dataset(name, data=array[part], dtype=kept)
                        layout[part] = h5py.VirtualSource(file[name])
                file.create_virtual_dataset("x", layout, fillvalue=fill)
                return
            options = {} if kind in ("contiguous", "unwritten") else {"chunks": chunks}
            if kind == "compressed":
                options |= filters
            if kind == "compact":
                plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plan.set_layout(h5py.h5d.COMPACT)
                made = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple(shape), plan)
                dataset = h5py.Dataset(made)
            else:
                dataset = file.create_dataset("x", shape, kept, fillvalue=fill, **options)
            if kind == "filled":
                dataset[:cut] = array[:cut]
            elif kind != "unwritten":
                dataset[...] = array

    return write


KINDS = ["contiguous", "chunked", "compressed", "virtual", "filled", "unwritten", "compact"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resident_mapped_and_streamed_rows_are_equal_in_any_layout(kind):
    tally = Tally(f"HDF5 rows, {kind}")

    @attack(60)
    @given(st.data(), st.integers(1, 9), st.integers(1, 6))
    def rows(data, num_samples, width):
        write = data.draw(layouts(kind, (num_samples, width)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.h5"
            write(path)

            def compare() -> None:
                resident = rows_of(path, num_samples, width, None)
                np.testing.assert_array_equal(rows_of(path, num_samples, width, 0), resident)
                with h5py.File(path) as file:
                    np.testing.assert_array_equal(file["x"][...].astype(np.float32), resident)

            tally.refused(compare, path)

    rows()
    tally.report()
    assert tally.right
    assert all("holds numbers of type" in each for each in tally.kinds), tally.kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_volumes_from_memory_and_disk_are_equal_in_any_layout(kind):
    tally = Tally(f"HDF5 volumes, {kind}")

    @attack(25)
    @given(st.data(), st.integers(1, 4))
    def volumes(data, size):
        write = data.draw(layouts(kind, (1, size, size, size)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.h5"
            write(path)

            def compare() -> None:
                in_memory = volume_of(path, size, "memory")
                np.testing.assert_array_equal(volume_of(path, size, "disk"), in_memory)

            tally.refused(compare, path)

    volumes()
    tally.report()
    assert tally.right
    assert all("holds numbers of type" in each for each in tally.kinds), tally.kinds


# ------------------------------------------------------------------------------------------------ numbers elsewhere


def _external_link(file: h5py.File, other: Path) -> None:
    file["x"] = h5py.ExternalLink(str(other), "/x")


def _soft_to_external(file: h5py.File, other: Path) -> None:
    file["inside/y"] = h5py.ExternalLink(str(other), "/x")
    file["x"] = h5py.SoftLink("/inside/y")


def _group_elsewhere(file: h5py.File, other: Path) -> None:
    file["inside"] = h5py.ExternalLink(str(other), "/")
    file["x"] = h5py.SoftLink("inside/x")


def _external_storage(file: h5py.File, other: Path) -> None:
    file.create_dataset("x", (4, 2), np.float32, external=[(str(other), 0, h5py.h5f.UNLIMITED)])


def _virtual_elsewhere(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout((4, 2), np.float32)
    layout[:] = h5py.VirtualSource(str(other), "x", (4, 2), np.float32)
    file.create_virtual_dataset("x", layout)


def _virtual_of_many(file: h5py.File, other: Path) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.VIRTUAL)
    space = h5py.h5s.create_simple((4, 2), (h5py.h5s.UNLIMITED, 2))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 2), (1, 2))
    source = h5py.h5s.create_simple((1, 2))
    plan.set_virtual(space, f"{other}%b".encode(), b"x", source)
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4, 2), (h5py.h5s.UNLIMITED, 2)), plan)


def _virtual_of_stored_elsewhere(file: h5py.File, other: Path) -> None:
    file.create_dataset("y", (4, 2), np.float32, external=[(str(other), 0, h5py.h5f.UNLIMITED)])
    layout = h5py.VirtualLayout((4, 2), np.float32)
    layout[:] = h5py.VirtualSource(file["y"])
    file.create_virtual_dataset("x", layout)


ELSEWHERE = [
    _external_link,
    _soft_to_external,
    _group_elsewhere,
    _external_storage,
    _virtual_elsewhere,
    _virtual_of_many,
    _virtual_of_stored_elsewhere,
]


@pytest.fixture(params=ELSEWHERE, ids=lambda way: way.__name__.strip("_"))
def leading_elsewhere(request, tmp_path) -> Path:
    """A file whose dataset is somewhere else: in a pipe that nobody writes to, which a reader would wait for."""
    os.mkfifo(tmp_path / "other.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["numbers"] = np.full((4, 2), 7, np.float32)
        request.param(file, tmp_path / "other.h5")
    return tmp_path / "a.h5"


@pytest.mark.parametrize("budget", [None, 0])
def test_numbers_in_other_files_are_refused_before_those_are_opened(leading_elsewhere, budget):
    with no_hang(), pytest.raises(UserError, match=READ) as caught:
        rows_of(leading_elsewhere, 4, 2, budget)
    assert str(leading_elsewhere) in str(caught.value)


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_volumes_in_other_files_are_refused(leading_elsewhere, mode):
    with no_hang(), pytest.raises(UserError, match=READ):
        volume_of(leading_elsewhere, 2, mode)


def test_the_linked_file_is_refused_even_where_it_holds_good_numbers(tmp_path):
    """As once read: 0, 1, 2, 3 by one reader and 7, 7, 7, 7, from the same place in the wrong file, by another."""
    for name, values in (("a.h5", np.full(4, 7)), ("b.h5", np.arange(4))):
        with h5py.File(tmp_path / name, "w") as file:
            file["x" if name == "b.h5" else "y"] = values.astype(np.float32)[:, None]
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["x"] = h5py.ExternalLink("b.h5", "x")
    for budget in (None, 0):
        with pytest.raises(UserError, match="x is a link to another file"):
            rows_of(tmp_path / "a.h5", 4, 1, budget)


def test_links_within_the_file_are_followed_and_endless_ones_are_not(tmp_path):
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/inside/y"] = values
        file["deep/way"] = h5py.SoftLink("inside")
        file["x"] = h5py.SoftLink("/deep/way/y")
    np.testing.assert_array_equal(rows_of(tmp_path / "a.h5", 4, 2, 0), values)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"], file["y"] = h5py.SoftLink("y"), h5py.SoftLink("x")
    with pytest.raises(UserError, match="behind more than 16 links"):
        rows_of(tmp_path / "b.h5", 4, 2, None)


def test_a_virtual_dataset_with_a_missing_part_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.ones((4, 2), np.float32)
        layout = h5py.VirtualLayout((4, 2), np.float32)
        layout[:] = h5py.VirtualSource(file["y"])
        file.create_virtual_dataset("x", layout)
        del file["y"]
    with pytest.raises(UserError, match=r"made of /?y, which is not there"):
        rows_of(tmp_path / "a.h5", 4, 2, None)


@pytest.mark.parametrize(("value", "part"), [(h5py.Empty("f4"), "nothing"), (np.float32(1), "a single number")])
def test_datasets_without_samples(tmp_path, value, part):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = value
    for read in (lambda path: rows_of(path, 1, 1, None), lambda path: volume_of(path, 1, "memory")):
        with pytest.raises(UserError, match=f"x holds {part}, expected samples"):
            read(tmp_path / "a.h5")
    done = podium_here("data", "info", tmp_path / "a.h5")
    assert done.returncode == 0, done.stderr


def test_info_describes_what_leads_elsewhere_without_going_there(leading_elsewhere):
    with no_hang():
        done = podium_here("data", "info", leading_elsewhere)
    assert done.returncode == 0, done.stderr
    assert "numbers" in done.stdout


def test_a_pipe_in_the_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "a.h5")
    with no_hang():
        assert_user_error(podium_here("data", "info", tmp_path / "a.h5"), "it is a named pipe, not a file")


# ---------------------------------------------------------------------------------------------------------- damage


@pytest.mark.slow
def test_damaged_files_are_told_or_read_alike_by_all_readers(tmp_path):
    originals = []
    for number, options in enumerate([{}, {"chunks": (2, 3)}, {"chunks": (3, 2), "compression": "gzip"}]):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(24, dtype=np.float32).reshape(8, 3), **options)
        originals.append(path.read_bytes())
    inputs: list[bytes] = []

    @attack(500)
    @given(damaged(originals, head=900))
    def collect(data):
        inputs.append(data)

    collect()

    def read_all(tally: Tally) -> None:
        path = tmp_path / "damaged.h5"
        for number, data in enumerate(inputs):
            (tmp_path / "last").write_text(str(number))
            path.write_bytes(data)

            def compare() -> None:
                resident = rows_of(path, 8, 3, None)
                assert rows_of(path, 8, 3, 0).tobytes() == resident.tobytes()

            tally.refused(compare, path)
        tally.report()
        assert 0 < tally.right < tally.inputs

    # In a process of its own: the HDF5 library is C, and may end it.
    child = os.fork()
    if not child:
        status = 1
        try:
            read_all(Tally("HDF5 damaged"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"status {status} at input {inputs[int((tmp_path / 'last').read_text())]!r}"
