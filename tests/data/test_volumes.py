"""Crops of periodic boxes: all 48 turns, vectors with them, the same crops however they are stored, read, divided."""

import gc
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podium.data.feed import Feed
from podium.data.sample_plan import train_blocks
from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.data.volumes.crops import VolumeArray, VolumeCrops
from podium.data.volumes.cube_symmetries import SYMMETRIES, Symmetry, copy_crop, transformed_channels
from podium.errors import UserError
from podium.machine.memory import divide_memory
from podium.recipe.sections.batch import BatchSection

SIZE, CROP, NUM = 12, 5, 64
ARRAYS = {"nbody": VolumeArray("Nbody", 4, ((1, 2, 3),)), "hydro": VolumeArray("Hydro", 5, ((2, 3, 4),))}
STILL = SYMMETRIES[0]


def box_of(channels: int, size: int, seed: int = 0) -> np.ndarray:
    """Numbers that float16 holds exactly."""
    rng = np.random.default_rng(seed + channels)
    return (rng.integers(-2000, 2000, (channels, size, size, size)) / 64).astype(np.float32)


def write(path: Path, size: int = SIZE, dtype: str = "float32", seed: int = 0, **storage) -> Path:
    with h5py.File(path, "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            file.create_dataset(name, data=box_of(channels, size, seed).astype(dtype), **storage)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("boxes") / "box.h5")


def crops(path, crop=CROP, num_samples=NUM, *, seed=3, mode="memory", **options) -> VolumeCrops:
    return VolumeCrops(path, ARRAYS, crop, num_samples, seed=seed, mode=mode, **options)


def gathered(source: VolumeCrops, samples=None, epoch: int | None = 0) -> dict[str, np.ndarray]:
    samples = np.arange(len(source)) if samples is None else np.asarray(samples, np.int64)
    out = empty_buffers(source.fields, len(samples))
    for array in out.values():
        array.fill(np.nan)
    start_gather(source, SampleRequest(samples, None if epoch is None else samples, epoch), out)()
    return out


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in ARRAYS)


def periodic(box: np.ndarray, start, crop: int) -> np.ndarray:
    return box[np.ix_(np.arange(len(box)), *((first + np.arange(crop)) % box.shape[1] for first in start))]


def by_numpy(volume: np.ndarray, turn: Symmetry) -> np.ndarray:
    """Channels as they are, the three axes after them turned."""
    moved = volume.transpose(0, *(axis + 1 for axis in turn.axes))
    return np.flip(moved, [k + 1 for k in range(3) if turn.flips[k]])


# ------------------------------------------------------------------------------------------------ cutting and turning


def test_the_48_turns_are_all_different_and_the_first_changes_nothing():
    volume = np.arange(27.0).reshape(1, 3, 3, 3)
    assert len({by_numpy(volume, turn).tobytes() for turn in SYMMETRIES}) == len(SYMMETRIES) == 48
    assert np.array_equal(by_numpy(volume, STILL), volume)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("size", "crop"), [(12, 5), (7, 7), (37, 33), (2, 1)])
def test_a_crop_is_what_transposing_and_flipping_the_periodic_box_gives(size, crop, dtype):
    box = box_of(3, size)
    rng = np.random.default_rng(size)
    for turn in SYMMETRIES:
        start = rng.integers(0, size, 3)
        out = np.full((3, crop, crop, crop), np.nan, np.float32)
        copy_crop(box.astype(dtype), start, turn, np.arange(3), np.ones(3, np.float32), out)
        assert np.array_equal(out, by_numpy(periodic(box, start, crop), turn))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_start_size_and_turn(data):
    size = data.draw(st.integers(1, 20))
    crop = data.draw(st.integers(1, size))
    start = data.draw(st.tuples(*[st.integers(0, size - 1)] * 3))
    turn = data.draw(st.sampled_from(SYMMETRIES))
    channels, signs = transformed_channels(4, ((1, 2, 3),), turn)
    box = box_of(4, size)
    out = np.full((4, crop, crop, crop), np.nan, np.float32)
    copy_crop(box, start, turn, channels, signs, out)
    assert np.array_equal(out, by_numpy(periodic(box, start, crop), turn)[channels] * signs[:, None, None, None])


def test_every_number_of_half_precision_becomes_the_same_in_single():
    side = 41
    bits = np.resize(np.arange(2**16, dtype=np.uint16), side**3)
    box = bits.view(np.float16).reshape(1, side, side, side)
    out = np.empty(box.shape, np.float32)
    copy_crop(box, (0, 0, 0), STILL, np.arange(1), np.ones(1, np.float32), out)
    np.testing.assert_array_equal(out, box.astype(np.float32))
    assert np.array_equal(np.signbit(out), np.signbit(box))


def gradient(scalar: np.ndarray) -> np.ndarray:
    return np.stack([np.roll(scalar, -1, axis) - np.roll(scalar, 1, axis) for axis in range(3)])


@pytest.mark.parametrize("turn", SYMMETRIES)
def test_the_gradient_of_a_turned_field_is_the_turned_gradient(turn):
    """The whole box as crop: it is periodic then, and the gradient can be taken of what is delivered."""
    scalar = box_of(1, 8)[0]
    box = np.concatenate([scalar[None], gradient(scalar)])
    out = np.empty(box.shape, np.float32)
    copy_crop(box, (3, 0, 6), turn, *transformed_channels(4, ((1, 2, 3),), turn), out)
    assert np.array_equal(gradient(out[0]), out[1:])


def test_vectors_stay_as_they_are_where_this_is_asked_for(path):
    plain, turned = (gathered(crops(path, turn_vectors=vectors)) for vectors in (False, True))
    drawn = crops(path).of_epoch(0).drawn(np.arange(NUM))
    for name, dataset_channels in (("nbody", 4), ("hydro", 5)):
        box = box_of(dataset_channels, SIZE)
        for row, (_, start, turn) in enumerate(drawn):
            assert np.array_equal(plain[name][row], by_numpy(periodic(box, start, CROP), SYMMETRIES[turn]))
            channels, signs = transformed_channels(dataset_channels, ARRAYS[name].vectors, SYMMETRIES[turn])
            assert np.array_equal(turned[name][row], plain[name][row][channels] * signs[:, None, None, None])
        first_vector = ARRAYS[name].vectors[0][0]
        assert np.array_equal(plain[name][:, :first_vector], turned[name][:, :first_vector])
    assert not same(plain, turned)


# ------------------------------------------------------------------------------------------------------ how it is read

STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (1, 5, 4, 7)},
    "compressed": {"chunks": (2, 6, 12, 3), "compression": "gzip"},
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("storage", STORAGE.values(), ids=STORAGE)
@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_however_it_is_stored_and_read_crops_are_the_same(tmp_path, path, mode, storage, dtype):
    other = write(tmp_path / "other.h5", dtype=dtype, **storage)
    for crop in (CROP, SIZE):
        assert same(gathered(crops(other, crop, mode=mode)), gathered(crops(path, crop)))


def test_datasets_of_one_file_may_be_stored_differently(tmp_path, path):
    with h5py.File(tmp_path / "mixed.h5", "w") as file:
        file["Nbody"] = box_of(4, SIZE)
        file.create_dataset("Hydro", data=box_of(5, SIZE), chunks=(5, 3, 3, 3))
    for mode in ("memory", "disk"):
        assert same(gathered(crops(tmp_path / "mixed.h5", mode=mode)), gathered(crops(path)))


@pytest.mark.parametrize("storage", STORAGE.values(), ids=STORAGE)
@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_files_are_closed_with_their_source(tmp_path, mode, storage):
    path = write(tmp_path / "box.h5", **storage)
    source = crops(path, mode=mode)
    gathered(source)
    del source
    gc.collect()
    with h5py.File(path, "r+"):
        pass


def test_boxes_of_several_files_are_all_used(tmp_path):
    paths = [write(tmp_path / f"{seed}.h5", seed=seed) for seed in (0, 1, 2)]
    source = crops(paths)
    got = gathered(source)
    drawn = source.of_epoch(0).drawn(np.arange(NUM))
    assert {box for box, _, _ in drawn} == {0, 1, 2}
    for row, (box, start, turn) in enumerate(drawn):
        expected = by_numpy(periodic(box_of(4, SIZE, box)[:1], start, CROP), SYMMETRIES[turn])
        assert np.array_equal(got["nbody"][row, :1], expected)


# -------------------------------------------------------------------------------------------------- what is drawn when


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, NUM - 1), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 5))
@example([7, 7, 0], 2, 1)
def test_a_crop_depends_on_seed_epoch_and_number_alone(path, samples, threads, epoch):
    whole = gathered(crops(path), epoch=epoch)
    some = gathered(crops(path, threads=threads, mode="disk"), samples, epoch)
    assert same(some, {name: array[samples] for name, array in whole.items()})


@pytest.mark.parametrize("shuffle", ["global", "shard"])
def test_crops_of_a_training_are_the_same_on_any_number_of_instances(path, shuffle):
    batch = BatchSection(micro=2, accumulation=1, replicas=4, shuffle=shuffle)
    num_samples, num_updates = 20, 5  # two updates an epoch, and four samples that are left over

    def trained(replicas: range, per_block: int) -> list[tuple[int, bytes]]:
        source = crops(path, num_samples=num_samples)
        blocks = train_blocks(
            seed=1, num_samples=num_samples, batch=batch, replicas=replicas, first_update=0, last_update=num_updates,
            updates_per_block=per_block,
        )  # fmt: skip
        with Feed(source, blocks, per_block * batch.global_batch) as feed:
            return [
                (int(sample), row.numpy().tobytes())
                for block in feed
                for sample, row in zip(block.samples, block.rows["hydro"], strict=True)
            ]

    whole = trained(range(4), 2)
    parts = [trained(range(first, first + 2), 1) for first in (0, 2)]
    by_update = [part[update * 4 : update * 4 + 4] for update in range(num_updates) for part in parts]
    assert [row for rows in by_update for row in rows] == whole
    # Literally (seed, epoch, i): the update says which epoch it is.
    for place, (sample, row) in enumerate(whole):
        epoch = place // batch.global_batch // 2
        assert gathered(crops(path), [sample], epoch)["hydro"].tobytes() == row


def test_other_epochs_and_seeds_have_other_crops(path):
    source = crops(path)
    versions = [gathered(source, epoch=epoch) for epoch in (0, 1, 2)] + [gathered(crops(path, seed=4))]
    for left, right in pairwise(versions):
        repeated = (left["nbody"] == right["nbody"]).reshape(NUM, -1).all(axis=1)
        assert repeated.sum() <= 1  # 82,944 crops there are: one may come again


def test_fixed_crops_are_the_same_in_every_epoch_and_not_turned(path):
    source = crops(path, fixed=True)
    first = gathered(source, epoch=None)
    assert same(gathered(source, epoch=0), first)
    assert same(gathered(source, epoch=7), first)
    drawn = source.drawn(np.arange(NUM))
    assert {turn for _, _, turn in drawn} == {0}
    for name, box in (("nbody", box_of(4, SIZE)), ("hydro", box_of(5, SIZE))):
        for row, (_, start, _) in enumerate(drawn):
            assert np.array_equal(first[name][row], periodic(box, start, CROP))
    assert len({start for _, start, _ in drawn}) > NUM / 2


def test_outside_of_a_training_crops_are_fixed_ones(path):
    assert same(gathered(crops(path), epoch=None), gathered(crops(path, fixed=True)))


def test_training_without_an_epoch_is_refused(path):
    """Whoever wraps a source and forgets to hand the epoch on would train on the same crops in every epoch."""
    samples = np.arange(3)
    source = crops(path)
    with pytest.raises(AssertionError):
        source.gather(samples, empty_buffers(source.fields, 3), samples)


def test_without_turning_crops_of_a_training_keep_their_axes(path):
    drawn = crops(path, turns=range(1)).of_epoch(1).drawn(np.arange(NUM))
    assert {turn for _, _, turn in drawn} == {0}


def test_every_turn_and_every_start_comes_equally_often(path):
    num = 48_000
    source = crops(path, num_samples=num).of_epoch(2)
    drawn = np.array([(*start, turn) for _, start, turn in source.drawn(np.arange(num))])
    for column, choices in enumerate((SIZE, SIZE, SIZE, len(SYMMETRIES))):
        counts = np.bincount(drawn[:, column], minlength=choices)
        assert len(counts) == choices
        # Chi-squared has a mean of choices - 1; six standard deviations above it.
        expected = num / choices
        assert ((counts - expected) ** 2 / expected).sum() < choices - 1 + 6 * np.sqrt(2 * choices)
    correlations = np.corrcoef(drawn.T)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(num)


# ----------------------------------------------------------------------------------------------------- the user's files


def fails(path, crop=CROP, arrays=ARRAYS, mode="memory") -> str:
    with pytest.raises(UserError) as caught:
        VolumeCrops(path, arrays, crop, NUM, seed=0, mode=mode)
    text = str(caught.value)
    assert not text.endswith(".")
    assert "\n" not in text
    return text


def test_missing_dataset_names_what_is_there(path):
    text = fails(path, arrays={"gas": VolumeArray("Gas", 5)})
    assert str(path) in text
    assert "no dataset 'Gas'" in text
    assert "Hydro, Nbody" in text


@pytest.mark.parametrize("shape", [(3, 6, 6, 6), (4, 6, 6, 8), (4, 6, 6), (4, 0, 0, 0)])
def test_wrong_number_of_channels_or_not_a_cube(tmp_path, shape):
    with h5py.File(tmp_path / "box.h5", "w") as file:
        file["Nbody"] = np.zeros(shape, np.float32)
        file["Hydro"] = np.zeros((5, 6, 6, 6), np.float32)
    text = fails(tmp_path / "box.h5")
    assert str(shape) in text
    assert "expected (4, N, N, N)" in text


def test_boxes_of_unequal_size(tmp_path, path):
    with h5py.File(tmp_path / "box.h5", "w") as file:
        file["Nbody"] = np.zeros((4, 6, 6, 6), np.float32)
        file["Hydro"] = np.zeros((5, 8, 8, 8), np.float32)
    text = fails(tmp_path / "box.h5")
    assert "Nbody of" in text
    assert "6³" in text
    assert "8³" in text
    assert "same size" in fails([path, write(tmp_path / "smaller.h5", size=8)])


def test_crop_larger_than_the_box(path):
    assert "too small for crops of 13³" in fails(path, crop=13)


def test_numbers_of_another_type(tmp_path):
    assert "float64" in fails(write(tmp_path / "box.h5", dtype="float64"))


def test_not_hdf5_and_not_there(tmp_path):
    (tmp_path / "text.h5").write_text("no box\n" * 100)
    assert "is not an HDF5 file" in fails(tmp_path / "text.h5")
    assert "There is no file" in fails(tmp_path / "none.h5")


def test_truncated_file(tmp_path):
    path = write(tmp_path / "box.h5")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    assert "truncated" in fails(path)


def test_damaged_chunk_is_told_when_read(tmp_path):
    path = write(tmp_path / "box.h5", chunks=(4, SIZE, SIZE, SIZE), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["Nbody"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(data)
    assert "damaged" in fails(path)
    with pytest.raises(UserError, match="damaged"):
        gathered(crops(path, mode="disk"))


@pytest.mark.parametrize("storage", [{}, {"chunks": True}], ids=["mapped", "loaded"])
def test_a_box_larger_than_memory_is_left_on_the_disk(tmp_path, monkeypatch, request, storage):
    path = write(tmp_path / "box.h5", **storage)
    needed = 9 * SIZE**3 * 4
    monkeypatch.setattr(
        "podium.data.sources.hdf5.psutil.virtual_memory", lambda: type("M", (), {"available": 2 * needed - 1})
    )
    gathered(crops(path))
    request.addfinalizer(lambda: divide_memory(1))
    divide_memory(2)
    if storage:  # each of two instances would load it
        assert "mode=disk" in fails(path)
    else:
        gathered(crops(path))
        monkeypatch.setattr(
            "podium.data.sources.hdf5.psutil.virtual_memory", lambda: type("M", (), {"available": needed - 1})
        )
        assert "mode=disk" in fails(path)
    gathered(crops(path, mode="disk"))
