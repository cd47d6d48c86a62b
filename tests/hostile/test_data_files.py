"""Data files that are damaged, or made to harm: one sentence, or exactly what an independent reading gives."""

import gzip
import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from podium.data.formats import cifar
from podium.data.formats.idx import read_idx, write_idx
from podium.data.formats.npy import read_npy
from podium.data.formats.tfrecord import RecordFile, build_example, parse_example, write_records
from podium.data.images.crops import ImageError, decode_crop, image_size
from podium.data.images.stores import open_folders
from podium.data.text.folder import load_tokenizer, open_text
from podium.data.text.token_windows import open_tokens
from podium.errors import UserError
from tests.support.hostile import NO_FILES, Tally, attack, changed_tree, damaged, no_hang, replace_by
from tests.support.photos import photo, saved
from tests.support.texts import write_text

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------------- IDX


def idx_as_defined(data: bytes) -> np.ndarray:
    """Read as the format's definition says, without a check."""
    types = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, types[data[2]], offset=4 + 4 * data[3]).reshape(shape)


def test_idx(tmp_path):
    originals = []
    for name, array in {
        "a": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "b.gz": np.arange(60, dtype=np.uint8),
        "c": np.linspace(0, 1, 6).reshape(3, 2),
        "d": np.zeros((0, 5), np.int16),
    }.items():
        write_idx(tmp_path / name, array)
        originals.append((tmp_path / name).read_bytes())
    tally, path = Tally("IDX"), tmp_path / "damaged"

    @attack(1000)
    @given(damaged(originals, head=20), st.booleans())
    def damage(data, mapped):
        path.write_bytes(data)
        tally.refused(
            lambda: np.testing.assert_array_equal(read_idx(path, memory_map=mapped), idx_as_defined(data)), path
        )

    damage()
    tally.report()
    assert tally.right
    assert len(tally.kinds) >= 4


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (2**32 - 1,) * 32, (2**31, 0, 2**31, 2**31)])
def test_idx_with_absurd_dimensions(tmp_path, shape):
    path = tmp_path / "x"
    path.write_bytes(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(10))
    with pytest.raises(UserError, match=r"promises"):
        read_idx(path)


# ----------------------------------------------------------------------------------------------------------- CIFAR


def test_cifar_binaries(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (2, 3073), np.uint8)
    rows[:, 0] = [3, 9]
    tally, path = Tally("CIFAR"), tmp_path / "test_batch.bin"

    @attack(200)
    @given(damaged([rows.tobytes(), rows[:1].tobytes()], head=3))
    def damage(data):
        path.write_bytes(data)

        def compare() -> None:
            images, labels = cifar.load(tmp_path, "cifar10", "test")
            raw = np.frombuffer(data, np.uint8).reshape(-1, 3073)
            np.testing.assert_array_equal(labels, raw[:, 0])
            np.testing.assert_array_equal(images.transpose(0, 3, 1, 2).reshape(len(raw), -1), raw[:, 1:])

        tally.refused(compare, path)

    damage()
    tally.report()
    assert tally.right
    assert tally.kinds


# -------------------------------------------------------------------------------------------------------- TFRecord


def test_tfrecords_give_the_records_that_were_written_or_a_sentence(tmp_path):
    records = [build_example({"image/encoded": [b"x" * n], "image/class/label": [n], "w": [0.5] * n}) for n in range(6)]
    path = tmp_path / "a.tfrecord"
    write_records(path, records)
    data_of_file, tally = path.read_bytes(), Tally("TFRecord")

    @attack(700)
    @given(damaged([data_of_file]), st.integers(0, 10**9))
    def damage(data, number):
        path = tmp_path / f"{number}.tfrecord"
        path.write_bytes(data)

        def compare() -> None:
            file = RecordFile(path)
            assert all(file.read(each) in records for each in range(len(file)))

        tally.refused(compare, path)
        path.unlink()

    damage()
    tally.report()
    assert tally.right
    assert tally.kinds


def test_messages_in_records(tmp_path):
    """Whose checksum is right, as its author has computed it."""
    example = build_example({"image/encoded": [b"xy"], "image/class/label": [3], "w": [0.5, 1.5]})
    seen = set()

    @attack(500)
    @given(damaged([example]))
    def damage(data):
        try:
            for values in parse_example(data).values():
                seen.add(type(next(iter(values), None)))
        except ValueError as error:
            seen.add(str(error))

    damage()
    assert {"it holds no Example message", bytes, int, float} <= seen


# ------------------------------------------------------------------------------------------------------ text folders


def everything_in(folder: Path) -> list:
    text = open_text(folder)
    return [np.array(part(split)) for split in ("train", "valid", "test") for part in (text.tokens, text.sentences)] + [
        text.documents("train")
    ]


def test_text_folders(tmp_path):
    folder = write_text(tmp_path / "text", num_documents=3, num_sentences=4)
    right, tally = everything_in(folder), Tally("folders of tokens")
    files = {name: (folder / name).read_bytes() for name in ("text.json", "train.bin", "train.sentences.npy")}

    @attack(350)
    @given(st.data(), st.sampled_from(sorted(files)))
    def damage(data, name):
        (folder / name).write_bytes(data.draw(damaged([files[name]], head=140)))

        def compare() -> None:
            found = everything_in(folder)
            if name == "text.json":  # tokens of other types, or other names
                return
            if name == "train.bin":
                raw = np.frombuffer((folder / name).read_bytes(), "<u2")
                np.testing.assert_array_equal(found[0], raw)
                return
            sentences = found[1]
            assert sentences[0] == 0
            assert sentences[-1] == right[1][-1]
            assert (np.diff(sentences) >= 0).all()

        tally.refused(compare, folder / name)
        (folder / name).write_bytes(files[name])

    damage()

    @attack(250)
    @given(changed_tree(json.loads(files["text.json"])))
    def change(tree):
        (folder / "text.json").write_text(json.dumps(tree))
        tally.refused(lambda: everything_in(folder), folder / "text.json")
        (folder / "text.json").write_bytes(files["text.json"])

    change()
    tally.report()
    assert tally.right
    assert len(tally.kinds) >= 3


@pytest.mark.parametrize("content", ["objects", "archive", "four terabytes of numbers"])
def test_arrays_that_are_none(tmp_path, content):
    path = tmp_path / "a.npy"
    if content == "objects":
        np.save(path, np.array([{}], object), allow_pickle=True)
    elif content == "archive":
        with path.open("wb") as file:
            np.savez(file, a=np.arange(3))
    else:
        head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (549755813888,), }"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + bytes(64))
    with pytest.raises(ValueError, match="it does not hold an array of numbers"):
        read_npy(path)


def megatron(lengths: list[int]) -> bytes:
    begins = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]])
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), 2)
    parts = [np.array(lengths, "<i4"), begins.astype("<i8"), np.array([0, len(lengths)], "<i8")]
    return head + b"".join(part.tobytes() for part in parts)


def test_indexed_tokens(tmp_path):
    tokens = np.arange(30, dtype="<u2")
    tokens.tofile(tmp_path / "a.bin")
    index, tally = tmp_path / "a.idx", Tally("indexed tokens")

    @attack(600)
    @given(damaged([megatron([10, 5, 15]), megatron([30])], head=40))
    def damage(data):
        index.write_bytes(data)

        def compare() -> None:
            found = open_tokens(index)
            assert found.tokens.tobytes() == tokens.tobytes()
            assert found.sequences[-1] == len(found.tokens)
            assert (np.diff(found.sequences) >= 0).all()

        tally.refused(compare, index)

    damage()
    tally.report()
    assert tally.right
    assert len(tally.kinds) >= 4


def test_tokenizers(tmp_path):
    from tokenizers import Tokenizer, models

    original = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str()
    path, tally = tmp_path / "tokenizer.json", Tally("tokenizer.json")

    @attack(300)
    @given(damaged([original.encode()]) | changed_tree(json.loads(original)).map(json.dumps).map(str.encode))
    def damage(data):
        path.write_bytes(data)
        tally.refused(lambda: load_tokenizer(path).encode("a b c"), path)

    damage()
    tally.report()
    assert tally.right
    assert tally.kinds


# ----------------------------------------------------------------------------------------------------------- images


def test_images_of_all_kinds():
    """JPEG files of photographs are in tests/data/test_jpeg_fuzz.py; here are the kinds that Pillow decodes."""
    image = Image.fromarray(photo(20, 24))
    originals = [saved(image, "PNG"), saved(image, "GIF"), saved(image, "BMP")]
    originals += [saved(image, "WEBP", lossless=True), saved(image.convert("CMYK")), saved(image, progressive=True)]
    seen = set()

    @attack(500)
    @given(damaged(originals, head=120))
    def damage(data):
        with no_hang():
            try:
                height, width = image_size(data)
                if height * width <= 1 << 18:
                    crop = decode_crop(data, 0, 0, min(8, height), min(8, width), 8)
                    assert crop.shape == (8, 8, 3)
                    seen.add("decoded")
            except ImageError as error:
                seen.add("refused" if len(str(error).splitlines()) <= 1 else str(error))

    damage()
    assert seen == {"decoded", "refused"}


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "PPM"])
def test_kinds_of_images_that_start_programs_or_are_seldom_used_are_refused(kind):
    data = saved(Image.fromarray(photo(20, 24)), kind)
    with pytest.raises(ImageError, match="not a JPEG, a PNG or another known kind"):
        image_size(data)


@pytest.mark.parametrize("kind", sorted(set(NO_FILES) - {"nothing"}))
def test_folders_of_images_with_no_files_in_them(tmp_path, kind):
    place = tmp_path / "train" / "cats"
    place.mkdir(parents=True)
    replace_by(place / "a.jpg", kind)
    store, _ = open_folders(tmp_path, "train", None)
    with no_hang(), pytest.raises(UserError, match=r"a\.jpg cannot be read: "):
        store.fetch(0)


# ----------------------------------------------------------------------------------------- what is no file at all


READERS = {
    "train-images-idx3-ubyte": read_idx,
    "test_batch.bin": lambda path: cifar.load(path.parent, "cifar10", "test"),
    "a.tfrecord": lambda path: [RecordFile(path).read(0)],
    "text.json": lambda path: everything_in(path.parent),
    "train.bin": lambda path: everything_in(path.parent),
    "train.sentences.npy": lambda path: everything_in(path.parent),
    "a.idx": open_tokens,
    "tokenizer.json": load_tokenizer,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_no_reader_waits_or_reads_for_ever(tmp_path, kind):
    for number, (name, read) in enumerate(READERS.items()):
        folder = write_text(tmp_path / str(number), num_documents=2, num_sentences=2)
        (folder / "a.bin").write_bytes(bytes(4))
        replace_by(folder / name, kind)
        tally = Tally(name)
        if name == "a.idx" and kind not in ("nothing", "four terabytes"):
            continue  # without an index that is a file, the tokens are read as they are
        if name == "a.tfrecord" and kind == "nothing":
            continue  # a file without records
        assert tally.refused(lambda folder=folder, name=name, read=read: read(folder / name)), f"{name} as {kind}"
        shutil.rmtree(folder)


def test_gzip_that_grows(tmp_path):
    """A few kilobytes that unpack to far more than the header says."""
    path = tmp_path / "train-images-idx3-ubyte"
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(struct.pack(">HBBI", 0, 8, 1, 10) + bytes(50_000_000))
    path.write_bytes(packed.getvalue())
    with pytest.raises(UserError, match="is longer than the 10 bytes its header promises"):
        read_idx(path)
