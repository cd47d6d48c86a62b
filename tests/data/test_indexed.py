"""Iterable datasets, written once into a store that has them by number."""

import json

import numpy as np
import pytest
import torch

from podium.data.indexed import IndexedDataset, write_indexed
from podium.data.padding import Pad
from podium.data.source import empty_buffers
from podium.data.sources.dataset import DatasetSource
from podium.errors import UserError


def samples():
    for number in range(7):
        yield {"tokens": torch.arange(number + 1), "image": np.full((2, 3), number, np.float32), "label": number}


def test_samples_come_back_bit_for_bit_and_by_number(tmp_path):
    stored = IndexedDataset(write_indexed(samples(), tmp_path / "store"))
    assert len(stored) == 7
    for number, sample in reversed(list(enumerate(samples()))):
        for name, value in sample.items():
            again = stored[number][name]
            assert (again == np.asarray(value)).all()
            assert (again.dtype, again.shape) == (np.asarray(value).dtype, np.asarray(value).shape)
    assert stored.lengths("tokens").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert stored.lengths("image").tolist() == [2] * 7


def test_a_store_is_a_dataset_to_train_on(tmp_path):
    stored = IndexedDataset(write_indexed(samples(), tmp_path / "store", max_samples=5))
    source = DatasetSource(stored, seed=0, pad={"tokens": Pad(8)}, lengths=stored.lengths("tokens"), workers=1)
    out = empty_buffers(source.fields, 2)
    source.gather(np.array([4, 1]), out)
    assert out["tokens_mask"].sum(axis=1).tolist() == [5, 2]
    assert out["label"].tolist() == [4, 1]
    source.close()


def test_a_store_is_written_whole_or_not_at_all(tmp_path):
    def broken():
        yield from samples()
        raise OSError("the link is gone")

    with pytest.raises(UserError, match=r"sample 7 of generator raised OSError: the link is gone\n.*test_indexed.py"):
        write_indexed(broken(), tmp_path / "store")
    with pytest.raises(UserError, match="x of sample 1 of list is float64 with 0 dimensions, but that of sample 0"):
        write_indexed([{"x": [1]}, {"x": 1.5}], tmp_path / "store")
    with pytest.raises(UserError, match="list has no samples"):
        write_indexed([], tmp_path / "store")
    assert not list(tmp_path.iterdir())
    write_indexed([1.5], tmp_path / "store")
    with pytest.raises(UserError, match="already exists"):
        write_indexed([1.5], tmp_path / "store")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "samples.json").unlink(),
        lambda folder: (folder / "samples.json").write_text("[]"),
        lambda folder: (folder / "samples.json").write_text("{"),
        lambda folder: (folder / "0.values").write_bytes(b"123"),
        lambda folder: (folder / "0.values").unlink(),
        lambda folder: (folder / "0.shapes").write_bytes(np.full(7, -1).tobytes()),
        lambda folder: (folder / "1.values").write_bytes(b"1234"),
        lambda folder: _change(folder, lambda index: index["fields"][0].update(dtype="|O")),
        lambda folder: _change(folder, lambda index: index.update(samples=-1)),
        lambda folder: _change(folder, lambda index: index.update(samples=10**6)),
        lambda folder: _change(folder, lambda index: index.update(format=99)),
    ],
)
def test_a_damaged_store_is_told_in_a_sentence(tmp_path, damage):
    folder = write_indexed(samples(), tmp_path / "store")
    damage(folder)
    with pytest.raises(UserError, match=r"damaged|not a store"):
        IndexedDataset(folder)


def _change(folder, change):
    index = json.loads((folder / "samples.json").read_text())
    change(index)
    (folder / "samples.json").write_text(json.dumps(index))
