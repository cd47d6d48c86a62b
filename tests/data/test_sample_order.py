"""The sample order is a permutation for any size, a pure function of (seed, epoch, position), and a good shuffle."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podium.data.sample_order import order, permute
from podium.machine import counter_rng

LARGEST = 1 << 40


def whole(seed: int, epoch: int, num_samples: int, **options) -> np.ndarray:
    return order(seed, epoch, np.arange(num_samples), num_samples, **options)


def network(stream: int, positions: np.ndarray, num_samples: int) -> np.ndarray:
    """The large-data path, also for sizes that `order` serves from a table."""
    x = positions.astype(np.uint64)
    permute(stream, x, num_samples)
    return x.astype(np.int64)


def deviations(observed: np.ndarray, expected: float, num_free: int) -> float:
    """Chi-square in standard deviations from its mean; beyond 5 chance is ruled out."""
    return float((((observed - expected) ** 2 / expected).sum() - num_free) / (2 * num_free) ** 0.5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150_000), st.integers(0, 2**31), st.integers(0, 1000))
@example(1, 0, 0)
@example(2, 0, 0)
@example(1 << 16, 0, 0)
@example((1 << 16) + 1, 0, 0)
def test_every_epoch_is_a_permutation_for_any_size(num_samples, seed, epoch):
    samples = whole(seed, epoch, num_samples)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(num_samples))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_the_network_is_a_permutation_for_any_size(num_samples, stream):
    assert np.array_equal(np.sort(network(stream, np.arange(num_samples), num_samples)), np.arange(num_samples))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, LARGEST), st.integers(0, 2**31), st.integers(0, 1000), st.data())
@example(LARGEST, 0, 0, None)
@example(LARGEST - 1, 0, 0, None)
def test_samples_of_huge_data_lie_inside_and_differ(num_samples, seed, epoch, data):
    last = num_samples - 1
    chosen = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=50, unique=True)) if data else [0, last]
    samples = order(seed, epoch, np.array(chosen), num_samples)
    assert samples.min() >= 0
    assert samples.max() <= last
    assert len(set(samples.tolist())) == len(chosen)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 100_000), st.integers(0, 100), st.data())
def test_any_subset_of_positions_agrees_with_the_whole(num_samples, epoch, data):
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=40)), dtype=np.int64)
    assert np.array_equal(order(7, epoch, positions, num_samples), whole(7, epoch, num_samples)[positions])


@pytest.mark.parametrize("num_samples", [1000, 100_000])
def test_epochs_seeds_and_shards_differ(num_samples):
    orders = [
        whole(0, 0, num_samples),
        whole(0, 1, num_samples),
        whole(1, 0, num_samples),
        whole(0, 0, num_samples, first=num_samples) - num_samples,
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # two unrelated permutations agree in about one place
            assert (one == other).sum() < 12


@pytest.mark.parametrize("num_samples", [1, 10, 100_000])
def test_a_shard_is_shuffled_within_itself(num_samples):
    samples = whole(3, 5, num_samples, first=1234)
    assert np.array_equal(np.sort(samples), 1234 + np.arange(num_samples))


def test_without_shuffling_positions_are_samples():
    positions = np.array([5, 0, 3])
    samples = order(0, 4, positions, 10, shuffle=False)
    assert samples.tolist() == [5, 0, 3]
    samples[0] = 9
    assert positions[0] == 5
    assert order(0, 4, positions, 10, first=20, shuffle=False).tolist() == [25, 20, 23]


def test_what_is_returned_belongs_to_the_caller():
    for num_samples in (100, 100_000):
        before = whole(0, 0, num_samples)
        whole(0, 0, num_samples)[:] = -1
        assert np.array_equal(before, whole(0, 0, num_samples))


@pytest.mark.parametrize("num_samples", [100, 100_000])
def test_positions_keep_their_shape_and_must_exist(num_samples):
    positions = np.arange(12).reshape(3, 4)
    assert np.array_equal(order(0, 0, positions, num_samples), order(0, 0, np.arange(12), num_samples).reshape(3, 4))
    assert order(0, 0, np.empty(0, np.int64), num_samples).size == 0
    with pytest.raises((AssertionError, IndexError)):
        order(0, 0, np.array([num_samples]), num_samples)


def test_the_order_never_changes_between_versions():
    """Runs in progress must resume into the same order: these numbers are a promise."""
    assert order(0, 0, np.arange(6), 60_000).tolist() == [45182, 10705, 41189, 45169, 6523, 33266]
    assert order(0, 0, np.arange(6), 1_000_000).tolist() == [427284, 271415, 49704, 117391, 626661, 172671]


def test_all_orders_of_four_samples_are_equally_frequent():
    counts = Counter(tuple(whole(0, epoch, 4).tolist()) for epoch in range(6000))
    assert len(counts) == 24
    assert abs(deviations(np.array(list(counts.values())), 6000 / 24, 23)) < 5


def test_every_sample_is_equally_likely_at_every_position():
    num_samples, num_epochs = 50, 4000
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(num_epochs):
        counts[np.arange(num_samples), whole(11, epoch, num_samples)] += 1
    assert abs(deviations(counts, num_epochs / num_samples, (num_samples - 1) ** 2)) < 5


@pytest.mark.parametrize("num_samples", [65_537, 100_000, 1 << 20, LARGEST])
def test_the_network_is_a_good_shuffle_of_large_data(num_samples):
    """Where samples land, and where neighbours land relative to each other, is even over the range and over epochs."""
    num_bins, num_epochs = 32, 2000
    positions = np.array([0, 1, 2, num_samples // 2, num_samples - 2, num_samples - 1])
    landed = np.array([network(counter_rng.key("test", e), positions, num_samples) for e in range(num_epochs)])
    bins = landed * num_bins // num_samples
    for i in range(len(positions)):
        counts = np.bincount(bins[:, i], minlength=num_bins)
        assert abs(deviations(counts, num_epochs / num_bins, num_bins - 1)) < 5
        for j in range(i):
            joint = np.bincount(bins[:, i] // 2 * 16 + bins[:, j] // 2, minlength=256)
            assert abs(deviations(joint, num_epochs / 256, 255)) < 5
    block = network(counter_rng.key("test"), np.arange(50_000), num_samples)
    steps = (np.diff(block) % num_samples) * num_bins // num_samples
    assert abs(deviations(np.bincount(steps, minlength=num_bins), len(steps) / num_bins, num_bins - 1)) < 5
