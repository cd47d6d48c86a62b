"""`podium data info` describes everything that trainings read, each kind by what is in it."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from podium.data.formats import cifar
from podium.data.formats.tfrecord import build_example, write_records
from tests.support.processes import assert_user_error, podium_here


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def printed(path) -> str:
    done = podium_here("data", "info", path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(text: str, *cells: str) -> bool:
    """Whether a line of a table has these cells, in this order."""
    return re.search(r" +│ +".join(map(re.escape, cells)), text) is not None


@pytest.mark.parametrize(
    ("kind", "inner"), [("cifar10", ""), ("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")]
)
def test_cifar_binaries(kind, inner, tmp_path):
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    num_labels = 1 if kind == "cifar10" else 2
    for name in cifar.file_names(kind):
        rows = np.zeros((20, num_labels + 3072), np.uint8)
        rows[:, num_labels - 1] = np.arange(20) % 5
        rows.tofile(folder / name)
    text = printed(tmp_path)
    assert f": {kind}" in text
    for name in cifar.file_names(kind):
        assert row(text, name, "20", "5", "32 × 32 × 3")
    assert row(printed(folder / cifar.file_names(kind)[-1]), "20", "5", "32 × 32 × 3")
    (folder / cifar.file_names(kind)[-1]).unlink()
    assert row(printed(tmp_path), cifar.file_names(kind)[-1], "missing")


def test_folders_of_pictures(tmp_path):
    for split, numbers in {"train": {"cat": 3, "dog": 2}, "test": {"cat": 1}}.items():
        for name, number in numbers.items():
            (tmp_path / split / name).mkdir(parents=True)
            for place in range(number):
                Image.new("RGB", (40, 30)).save(tmp_path / split / name / f"{place}.png")
    text = printed(tmp_path)
    assert row(text, "train", "5", "2", "2 … 3", "PNG 40 × 30")
    assert row(text, "test", "1", "1", "1 … 1", "PNG 40 × 30")
    assert "Classes: cat, dog" in text
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no picture")
    assert "not readable" in printed(tmp_path)


def test_tfrecord_files(tmp_path):
    records = [build_example({"image/encoded": [b"12345"], "image/class/label": [7]})] * 3
    for number in range(2):
        write_records(tmp_path / f"train-0000{number}-of-00002", records)
    write_records(tmp_path / "rows.tfrecord", [build_example({"input_ids": [1, 2, 3], "weights": [0.5, 1.0]})])
    text = printed(tmp_path)
    assert row(text, "train-…-of-00002", "2", "6", "image/class/label: 1 integer")
    assert "image/encoded: 5 bytes" in text
    assert row(text, "rows.tfrecord", "1", "1", "input_ids: 3 integers")
    assert "weights: 2 numbers" in text
    assert row(printed(tmp_path / "rows.tfrecord"), "rows.tfrecord", "1", "1")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_flat_tokens(dtype, tmp_path):
    np.arange(1, 101).astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "train.bin")
    np.arange(1, 11).astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 101, "itos": {"0": "a"}}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"12")  # not tokens
    text = printed(tmp_path)
    assert row(text, "train.bin", "100", "100", dtype)
    assert row(text, "val.bin", "10", "10", dtype)
    assert "vocab_size 101" in text
    assert "pytorch_model" not in text
    assert row(printed(tmp_path / "val.bin"), "val.bin", "10", "10", dtype)


def test_what_is_no_data_is_told(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    assert_user_error(podium_here("data", "info", tmp_path), "holds no data that Podium reads", "folders of pictures")
    assert_user_error(podium_here("data", "info", tmp_path / "absent"), "does not exist")
    (tmp_path / "odd.bin").write_bytes(b"123")
    assert_user_error(podium_here("data", "info", tmp_path / "odd.bin"), "not a whole number of uint16 tokens")
