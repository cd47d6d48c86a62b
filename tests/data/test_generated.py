"""Generated samples: pure functions of (seed, number), of the right shapes and ranges."""

import tracemalloc

import numpy as np
import pytest

from podium.data.source import Field, empty_buffers
from podium.data.sources.generated import GeneratedSource

FIELDS = {
    "image": Field((3, 5), np.float32),
    "label": Field((), np.int64),
    "tokens": Field((7,), np.int32),
    "mask": Field((4,), np.bool_),
    "half": Field((2,), np.float16),
}
RANGES = {"label": (0, 10), "tokens": (5, 1000), "half": (-1.0, 1.0)}


def _source(num_samples: int = 5000, **options) -> GeneratedSource:
    return GeneratedSource(FIELDS, num_samples, ranges=RANGES, **options)


def _gathered(source: GeneratedSource, samples) -> dict[str, np.ndarray]:
    samples = np.asarray(samples, np.int64)
    out = empty_buffers(source.fields, len(samples))
    source.gather(samples, out)
    return out


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in FIELDS)


def test_a_sample_depends_only_on_seed_and_number():
    whole = _gathered(_source(seed=3), np.arange(100))
    some = [97, 4, 4, 31]
    assert _equal(_gathered(_source(num_samples=100, seed=3), some), {name: a[some] for name, a in whole.items()})
    assert not _equal(_gathered(_source(seed=4), np.arange(100)), whole)


def test_splits_can_number_their_samples_from_elsewhere():
    whole = _gathered(_source(), np.arange(60))
    assert _equal(_gathered(_source(first_sample=50), np.arange(10)), {name: a[50:] for name, a in whole.items()})


def test_shapes_types_and_ranges_are_as_declared():
    got = _gathered(_source(), np.arange(5000))
    for name, field in FIELDS.items():
        assert got[name].shape == (5000, *field.shape)
        assert got[name].dtype == field.dtype
    assert set(np.unique(got["label"])) == set(range(10))
    assert got["tokens"].min() >= 5
    assert got["tokens"].max() < 1000
    assert np.abs(got["half"]).max() <= 1
    assert 0.4 < got["mask"].mean() < 0.6
    assert abs(got["image"].mean()) < 0.1
    assert abs(got["image"].std() - 1) < 0.1


def test_inputs_and_targets_belong_together_so_a_model_can_learn_them():
    got = _gathered(_source(), np.arange(5000))
    labels_of_image: dict[bytes, set[int]] = {}
    for image, label in zip(got["image"], got["label"], strict=True):
        labels_of_image.setdefault(image.tobytes(), set()).add(int(label))
    assert len(labels_of_image) > 100
    assert all(len(labels) == 1 for labels in labels_of_image.values())


def test_large_samples_take_little_memory():
    tracemalloc.start()
    source = GeneratedSource({"volume": Field((4, 64, 64, 64), np.float32)}, 65_536)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 20 < taken < 33 << 20
    assert len({_gathered(source, [i])["volume"].tobytes() for i in range(20)}) > 1


def test_an_integer_field_needs_a_range():
    with pytest.raises(AssertionError, match="needs a range"):
        GeneratedSource({"label": Field((), np.int64)}, 10)
