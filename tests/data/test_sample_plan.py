"""The plan of samples: the same whatever the blocks and whoever carries them, every sample in its place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.sample_plan import pass_blocks, samples_per_block, train_blocks
from podium.data.sources.arrays import ArraySource
from podium.recipe.sections.batch import BatchSection


def blocks_of(num_samples, batch, replicas=None, first=0, last=20, per_block=1, part="samples"):
    blocks = train_blocks(
        seed=3,
        num_samples=num_samples,
        batch=batch,
        replicas=replicas or range(batch.num_replicas),
        first_update=first,
        last_update=last,
        updates_per_block=per_block,
    )
    return [getattr(request, part) for request in blocks]


shuffles = pytest.mark.parametrize("shuffle", ["global", "shard"])


@shuffles
@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 200),
    micro=st.integers(1, 12),
    replicas=st.sampled_from([1, 2, 4]),
    first=st.integers(0, 30),
    num_updates=st.integers(0, 40),
    per_block=st.integers(1, 9),
)
def test_blocks_are_the_same_samples_whatever_their_size_and_wherever_one_starts(
    shuffle, num_samples, micro, replicas, first, num_updates, per_block
):
    batch = BatchSection(micro=micro, replicas=replicas, shuffle=shuffle)
    if batch.global_batch > num_samples:
        return
    last = first + num_updates
    one_by_one = np.array(blocks_of(num_samples, batch, last=last), dtype=np.int64).reshape(-1)
    blocks = blocks_of(num_samples, batch, first=first, last=last, per_block=per_block)
    assert np.array_equal(np.concatenate([*blocks, np.array([], np.int64)]), one_by_one[first * batch.global_batch :])


@shuffles
@pytest.mark.parametrize("num_instances", [2, 4])
def test_shares_of_instances_make_up_the_whole_batch(shuffle, num_instances):
    batch = BatchSection(micro=3, accumulation=2, replicas=4, shuffle=shuffle)
    whole = blocks_of(100, batch)
    share = 4 // num_instances
    parts = [blocks_of(100, batch, range(start, start + share)) for start in range(0, 4, share)]
    for update, block in enumerate(whole):
        assert np.array_equal(block, np.concatenate([part[update] for part in parts]))


@shuffles
@pytest.mark.parametrize("num_instances", [1, 2, 4])
def test_every_place_of_the_training_comes_once_whoever_carries_it(shuffle, num_instances):
    batch = BatchSection(micro=3, accumulation=2, replicas=4, shuffle=shuffle)
    share = 4 // num_instances
    parts = [blocks_of(100, batch, range(start, start + share), part="places") for start in range(0, 4, share)]
    by_update = [np.concatenate([part[update] for part in parts]) for update in range(20)]
    assert np.array_equal(np.concatenate(by_update), np.arange(20 * batch.global_batch))
    later = blocks_of(100, batch, first=7, last=20, per_block=3, part="places")
    assert np.array_equal(np.concatenate(later), np.arange(7 * batch.global_batch, 20 * batch.global_batch))


@shuffles
def test_an_epoch_holds_no_sample_twice_and_epochs_differ(shuffle):
    samples = np.concatenate(blocks_of(103, BatchSection(micro=5, replicas=2, shuffle=shuffle), per_block=4))
    first, second = samples[:100], samples[100:]
    assert len(set(first)) == len(set(second)) == 100
    assert not np.array_equal(first, second)


def test_shards_keep_every_replica_within_its_own_samples():
    batch = BatchSection(micro=5, replicas=4, shuffle="shard")
    for replica in range(4):
        samples = np.concatenate(blocks_of(103, batch, range(replica, replica + 1)))
        assert set(samples // 25) == {replica}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_pass_is_dealt_out_in_whole_micro_batches(count):
    num_samples, micro_batch = 103, 10
    passes = [pass_blocks(num_samples, micro_batch, 2, index, count) for index in range(count)]
    dealt = [np.concatenate([*(request.samples for request in one), []]) for one in passes]
    assert sorted(np.concatenate(dealt)) == list(range(num_samples))
    for index, samples in enumerate(dealt):
        assert set((samples // micro_batch % count).astype(int)) <= {index}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("num", "over"), [(1, 50), (7, 50), (49, 50), (50, 50)])
def test_a_limited_pass_is_spread_evenly_on_any_number_of_instances(num, over, count):
    passes = [pass_blocks(num, 3, 2, index, count, spread_over=over) for index in range(count)]
    samples = sorted(int(sample) for one in passes for request in one for sample in request.samples)
    assert samples == [place * over // num for place in range(num)]
    gaps = np.diff([*samples, over])
    assert gaps.min() >= over // num
    assert gaps.max() <= -(-over // num)


def test_blocks_hold_whole_units():
    source = ArraySource({"number": np.arange(10), "square": np.zeros((10, 1), np.float32)})
    assert samples_per_block(source, 7) % 7 == 0
    assert samples_per_block(source, 7, max_units=3) == 21
    assert samples_per_block(source, 10**9) == 10**9
