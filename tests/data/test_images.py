"""Images of shards and folders: every sample under its number, the same bytes however they are kept and decoded."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podium.data.feed import Feed
from podium.data.formats.tfrecord import build_example, write_records
from podium.data.gather_pool import work_slices
from podium.data.images import source as source_module
from podium.data.images.crops import centre_crop, decode_crop, image_size, random_windows
from podium.data.images.source import ImageSource, RandomCrops, folder_source, tfrecord_source
from podium.data.sample_plan import pass_blocks
from podium.data.source import empty_buffers
from podium.errors import UserError
from podium.machine import counter_rng
from tests.support.photos import encoded, photo, saved

SIZE = 48
CLASSES = ["cat", "dog", "emu"]


def pictures() -> list[bytes]:
    """One of each kind that ImageNet has, and a few more of the usual one."""
    plain = [encoded(photo(60 + 7 * i, 90 - 5 * i, seed=i)) for i in range(5)]
    picture = Image.fromarray(photo(70, 80, seed=9))
    return [
        *plain,
        encoded(photo(64, 80, seed=6), "gray"),
        saved(picture.convert("CMYK")),
        saved(picture, progressive=True),
        saved(picture, "PNG"),
        encoded(photo(200, 240, seed=7)),
        encoded(photo(49, 300, seed=8)),
    ]


IMAGES = pictures()
LABELS = [i % len(CLASSES) for i in range(len(IMAGES))]
BOXES = {2: [[0.0, 0.0, 0.3, 0.3]], 4: [[0.5, 0.6, 0.9, 0.9], [0.1, 0.1, 0.2, 0.2]]}


def example(i: int, label: int | None = None, **changes) -> bytes:
    features = {
        "image/encoded": [IMAGES[i]],
        "image/class/label": [LABELS[i] + 1 if label is None else label],
        "image/class/text": [b"a name"],
    }
    for column, side in enumerate(("ymin", "xmin", "ymax", "xmax")):
        features[f"image/object/bbox/{side}"] = [box[column] for box in BOXES.get(i, [])]
    features |= {name.replace("__", "/"): values for name, values in changes.items()}
    return build_example({name: values for name, values in features.items() if values is not None})


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard, part in enumerate([range(0, 4), range(4, 4), range(4, 11)]):
        write_records(folder / f"train-{shard:05}-of-00003", [example(i) for i in part])
    write_records(folder / "validation-00000-of-00001", [example(i) for i in range(3)])
    (folder / "readme.txt").write_text("not a shard")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The same images as files; sorted by class, then by name."""
    folder = tmp_path_factory.mktemp("files")
    for i, (data, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        for split in ("train", "val"):
            suffix = (".JPEG", ".jpg", ".jpeg", ".PNG")[i % 4]
            path = folder / split / CLASSES[label] / f"n{i:03}{suffix}"
            if split == "train" or i in (0, 1, 3):  # no image of the last class
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    (folder / "train" / "list.csv").write_text("no class")
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def gathered(source: ImageSource, samples=None, places=None) -> tuple[np.ndarray, np.ndarray]:
    samples = np.arange(len(source)) if samples is None else np.asarray(samples, np.int64)
    out = empty_buffers(source.fields, len(samples))
    for array in out.values():
        array[...] = 77
    source.gather(samples, out, None if places is None else np.asarray(places, np.int64))
    return out["image"], out["label"]


def same(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------ what is delivered


def test_fields_are_bytes_and_a_label(shards):
    source = tfrecord_source(shards, "train", SIZE)
    assert len(source) == len(IMAGES)
    assert {name: (field.shape, field.dtype) for name, field in source.fields.items()} == {
        "image": ((SIZE, SIZE, 3), np.uint8),
        "label": ((), np.int64),
    }


def test_without_places_the_middle_of_every_image_comes_with_its_label(shards):
    images, labels = gathered(tfrecord_source(shards, "train", SIZE, resize=56))
    assert labels.tolist() == LABELS
    assert np.array_equal(images, [centre_crop(data, 56, SIZE) for data in IMAGES])


def test_samples_come_in_the_order_asked_for(shards):
    source = tfrecord_source(shards, "train", SIZE)
    images, labels = gathered(source)
    some = [7, 0, 10, 7, 3]
    assert same(gathered(source, some), (images[some], labels[some]))
    assert same(gathered(source, []), (images[:0], labels[:0]))


def test_with_places_windows_are_drawn_from_them(shards):
    source = tfrecord_source(shards, "train", SIZE, crops=RandomCrops(seed=4))
    samples, places = np.array([3, 9, 3, 2, 4, 2, 2]), np.array([10, 11, 2**45, 5, 0, 6, 7])
    images, labels = gathered(source, samples, places)
    heights, widths = np.array([image_size(IMAGES[i]) for i in samples]).T
    boxes = [np.array(BOXES[i], np.float32) if i in BOXES else None for i in samples]
    windows = random_windows(counter_rng.key("crop", 4), places, heights, widths, boxes=boxes)
    expected = [decode_crop(IMAGES[i], *window, SIZE) for i, window in zip(samples, windows.tolist(), strict=True)]
    assert np.array_equal(images, expected)
    assert labels.tolist() == [LABELS[i] for i in samples]


def test_another_seed_or_place_gives_another_window(shards):
    source, other = (tfrecord_source(shards, "train", SIZE, crops=RandomCrops(seed=seed)) for seed in (0, 1))
    first, _ = gathered(source, [9, 9, 9], [1, 2, 1])
    assert np.array_equal(first[0], first[2])
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(gathered(other, [9], [1])[0][0], first[0])


def test_boxes_may_be_left_out_of_account(shards):
    places = np.arange(300)
    samples = np.full(300, 2)
    with_boxes = gathered(tfrecord_source(shards, "train", 8), samples, places)[0]
    without = gathered(tfrecord_source(shards, "train", 8, crops=RandomCrops(min_covered=0)), samples, places)[0]
    differ = (with_boxes != without).any(axis=(1, 2, 3)).mean()
    assert 0.1 < differ < 0.9


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_the_number_of_threads_and_the_division_into_blocks_change_no_byte(shards, cache, own_cache):
    samples = np.random.default_rng(0).integers(0, len(IMAGES), 60)
    places = np.arange(60) + 1000
    expected = gathered(tfrecord_source(shards, "train", SIZE, threads=1), samples, places)
    for threads in (2, 5):
        source = tfrecord_source(shards, "train", SIZE, threads=threads, cache=cache)
        assert same(gathered(source, samples, places), expected)
        parts = [gathered(source, samples[part], places[part]) for part in (slice(0, 7), slice(7, 60))]
        together = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        assert same(together, expected)


@pytest.mark.parametrize(("num_samples", "threads"), [(0, 2), (1, 4), (7, 1), (64, 2), (100, 64), (1000, 3)])
def test_shares_make_up_the_whole_and_end_small(num_samples, threads):
    parts = list(work_slices(num_samples, threads))
    assert [i for part in parts for i in range(num_samples)[part]] == list(range(num_samples))
    lengths = [part.stop - part.start for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-threads:] == [1] * min(threads, num_samples)


def test_a_source_serves_several_threads_at_once(shards):
    source = tfrecord_source(shards, "train", SIZE, threads=2)
    expected = gathered(source)
    results = []
    callers = [threading.Thread(target=lambda: results.append(gathered(source))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert all(same(result, expected) for result in results)


def test_decoding_threads_leave_openmp_to_the_training(shards, monkeypatch):
    import torch

    seen = set()
    decode = source_module.decode_crop
    monkeypatch.setattr(source_module, "decode_crop", lambda *args: (seen.add(torch.get_num_threads()), decode(*args)))
    before = torch.get_num_threads()
    gathered(tfrecord_source(shards, "train", SIZE, threads=3))
    assert seen == {1}
    assert torch.get_num_threads() == before


def test_the_feed_delivers_images(shards):
    source = tfrecord_source(shards, "train", SIZE)
    images, labels = gathered(source)
    with Feed(source, pass_blocks(len(source), 4, 1), 4) as feed:
        got = [(block.rows["image"].numpy().copy(), block.rows["label"].numpy().copy()) for block in feed]
    assert same(tuple(np.concatenate(arrays) for arrays in zip(*got, strict=True)), (images, labels))


def test_at_most_so_many_samples(shards):
    assert len(tfrecord_source(shards, "train", SIZE, max_samples=5)) == 5
    assert len(tfrecord_source(shards, "train", SIZE, max_samples=500)) == len(IMAGES)


# ------------------------------------------------------------------------------------------------ shards


def test_shards_may_lie_in_a_folder_of_the_split(shards, tmp_path):
    (tmp_path / "train").mkdir()
    for path in shards.glob("train-*"):
        (tmp_path / "train" / path.name).symlink_to(path)
    assert same(gathered(tfrecord_source(tmp_path, "train", SIZE)), gathered(tfrecord_source(shards, "train", SIZE)))


def test_validation_shards_are_found(shards):
    assert gathered(tfrecord_source(shards, "valid", SIZE))[1].tolist() == LABELS[:3]


def test_labels_may_count_from_elsewhere(tmp_path):
    write_records(tmp_path / "train-00000-of-00001", [example(0, 0), example(1, 9)])
    assert gathered(tfrecord_source(tmp_path, "train", SIZE, first_label=0))[1].tolist() == [0, 9]


def told(action, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    for part in parts:
        assert part in sentence, sentence


def test_shards_that_are_not_there_are_told(shards, tmp_path):
    told(lambda: tfrecord_source(tmp_path / "absent", "train", SIZE), "no folder", "absent")
    told(lambda: tfrecord_source(tmp_path, "train", SIZE), "train-00000-of", str(tmp_path))
    told(lambda: tfrecord_source(shards, "test", SIZE), "test-00000-of")


def test_incomplete_shards_are_told(shards, tmp_path):
    for number in (0, 2):
        (tmp_path / f"train-{number:05}-of-00003").symlink_to(shards / f"train-{number:05}-of-00003")
    told(lambda: tfrecord_source(tmp_path, "train", SIZE), "shard 1 is missing")
    (tmp_path / "train-00001-of-00002").symlink_to(shards / "train-00001-of-00003")
    told(lambda: tfrecord_source(tmp_path, "train", SIZE), "several data sets")


def test_shards_without_records_are_told(tmp_path):
    write_records(tmp_path / "train-00000-of-00001", [])
    told(lambda: tfrecord_source(tmp_path, "train", SIZE), "no records")


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (example(0, 0), ["label 0", "labels 1 … 3"]),
        (example(0, 4), ["label 4", "labels 1 … 3"]),
        (example(0, image__encoded=None), ["image/encoded"]),
        (example(0, image__encoded=[]), ["image/encoded"]),
        (example(0, image__class__label=None), ["image/class/label"]),
        (example(0, image__encoded=[b"no image"]), ["cannot be decoded"]),
        (example(0, image__encoded=[IMAGES[1][:900]]), ["cannot be decoded", "truncated"]),
        (example(0, image__object__bbox__xmin=[0.5]), ["bounding boxes"]),
        (b"\xff\xff\xff", ["no Example"]),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, record, parts):
    path = tmp_path / "train-00000-of-00001"
    write_records(path, [example(1), record])
    source = tfrecord_source(tmp_path, "train", SIZE, num_classes=3)
    told(lambda: gathered(source), "Record 1 (counted from 0)", str(path), *parts)
    assert gathered(source, [0])[1].tolist() == [LABELS[1]]


# ------------------------------------------------------------------------------------------------ folders


def in_order() -> list[int]:
    return sorted(range(len(IMAGES)), key=lambda i: (LABELS[i], i))


def test_folders_deliver_what_shards_do(files, shards):
    source = folder_source(files, "train", SIZE)
    assert source.class_names == tuple(CLASSES)
    assert same(gathered(source), gathered(tfrecord_source(shards, "train", SIZE), in_order()))


def test_classes_have_the_same_numbers_in_both_splits(files, tmp_path):
    for name in ("val", "validation", "valid", "test"):
        folder = tmp_path / name
        (folder / name / "emu").mkdir(parents=True)
        (folder / name / "emu" / "x.jpg").write_bytes(IMAGES[0])
        (folder / "train").symlink_to(files / "train")
        assert gathered(folder_source(folder, "valid", SIZE))[1].tolist() == [2]


def test_folders_that_cannot_be_used_are_told(files, tmp_path):
    told(lambda: folder_source(tmp_path / "absent", "train", SIZE), "no folder", "absent")
    told(lambda: folder_source(tmp_path, "train", SIZE), "called train")
    told(lambda: folder_source(tmp_path, "valid", SIZE), "or valid or test", "workload.data.valid_path")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.jpg").write_bytes(IMAGES[0])
    told(lambda: folder_source(tmp_path, "train", SIZE), "holds no folders")
    (tmp_path / "train" / "cat").mkdir()
    told(lambda: folder_source(tmp_path, "train", SIZE), "no images", "cat")
    told(lambda: folder_source(files, "train", SIZE, num_classes=2), "3 classes", "2 are expected")
    (tmp_path / "train" / "cat" / "x.jpg").write_bytes(b"no image")
    (tmp_path / "val" / "dog").mkdir(parents=True)
    (tmp_path / "val" / "dog" / "x.jpg").write_bytes(IMAGES[0])
    told(lambda: folder_source(tmp_path, "valid", SIZE), "a class dog")
    source = folder_source(tmp_path, "train", SIZE)
    told(lambda: gathered(source), str(tmp_path / "train" / "cat" / "x.jpg"), "cannot be decoded")
    (tmp_path / "train" / "cat" / "x.jpg").unlink()
    told(lambda: gathered(source), "cannot be read")


# ------------------------------------------------------------------------------------------------ caches


def copied(folder: Path, to: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def lost(folder: Path) -> None:
    """The contents of all files go, their names, sizes and times stay."""
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            path.write_bytes(bytes(status.st_size))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["shards", "files"])
def test_what_was_read_once_is_not_read_again(cache, kind, request, tmp_path, own_cache):
    folder = copied(request.getfixturevalue(kind), tmp_path / "data")
    make = tfrecord_source if kind == "shards" else folder_source
    expected = gathered(make(folder, "train", SIZE))
    source = make(folder, "train", SIZE, cache=cache)
    assert same(gathered(source, [3, 4]), tuple(array[[3, 4]] for array in expected))
    assert same(gathered(source), expected)
    lost(folder)
    assert same(gathered(source), expected)
    told(lambda: gathered(make(folder, "train", SIZE)))
    if cache == "disk":
        assert same(gathered(make(folder, "train", SIZE, cache="disk")), expected)


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_other_data_has_another_file(kind, request, tmp_path, own_cache):
    folder = copied(request.getfixturevalue(kind), tmp_path / "data")
    make = tfrecord_source if kind == "shards" else folder_source
    gathered(make(folder, "train", SIZE, cache="disk"))
    if kind == "shards":
        write_records(folder / "train-00000-of-00003", [example(1)] * 4)
    else:
        (folder / "train" / "cat" / "n000.JPEG").rename(folder / "train" / "cat" / "a.JPEG")
        (folder / "train" / "cat" / "a.JPEG").write_bytes(IMAGES[1])
    assert same(gathered(make(folder, "train", SIZE, cache="disk")), gathered(make(folder, "train", SIZE)))
    assert len(list(own_cache.glob("*.data"))) == 2


@pytest.mark.parametrize("damage", ["data", "short data", "no data", "index", "short index", "no index"])
def test_a_damaged_file_is_filled_again(shards, own_cache, damage):
    expected = gathered(tfrecord_source(shards, "train", SIZE, cache="disk"))
    (path,) = own_cache.glob("*.index" if "index" in damage else "*.data")
    content = bytearray(path.read_bytes())
    if damage.startswith("no"):
        path.unlink()
    elif damage.startswith("short"):
        path.write_bytes(content[: len(content) // 2 + 3])
    else:
        content[:] = bytes((byte + 0x3B) & 0xFF for byte in content)
        path.write_bytes(content)
    for _ in range(2):
        assert same(gathered(tfrecord_source(shards, "train", SIZE, cache="disk")), expected)


def test_each_sample_is_kept_once(shards, own_cache):
    for _ in range(3):
        gathered(tfrecord_source(shards, "train", SIZE, cache="disk"))
    (path,) = own_cache.glob("*.data")
    assert path.stat().st_size == sum(len(example(i)) for i in range(len(IMAGES)))


def test_two_sources_may_fill_one_file_at_the_same_time(shards, own_cache):
    first, second = (tfrecord_source(shards, "train", SIZE, cache="disk", threads=3) for _ in range(2))
    expected = gathered(tfrecord_source(shards, "train", SIZE))
    results = []
    callers = [threading.Thread(target=lambda s=source: results.append(gathered(s))) for source in (first, second)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 2
    assert all(same(result, expected) for result in [*results, gathered(first), gathered(second)])


def test_a_full_disk_costs_the_cache_only(shards, own_cache, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    expected = gathered(tfrecord_source(shards, "train", SIZE))
    source = tfrecord_source(shards, "train", SIZE, cache="disk")
    monkeypatch.setattr(os, "write", full)
    assert same(gathered(source), expected)


def test_a_cache_folder_that_cannot_be_written_is_told(shards, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written"):
        tfrecord_source(shards, "train", SIZE, cache="disk")
