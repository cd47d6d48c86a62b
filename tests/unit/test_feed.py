"""The feed: every sample where it belongs, buffers reused, errors and stops handed over."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.batch import BatchSection
from podium.data.arrays import ArraySource
from podium.data.feed import Feed, pass_blocks, samples_per_block, train_blocks


def source_of(num_samples: int) -> ArraySource:
    numbers = np.arange(num_samples, dtype=np.int64)
    return ArraySource({"number": numbers, "square": (numbers**2).astype(np.float32)[:, None]})


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
    return [getattr(wanted, part) for wanted in blocks]


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
    dealt = [np.concatenate([*(wanted.samples for wanted in one), []]) for one in passes]
    assert sorted(np.concatenate(dealt)) == list(range(num_samples))
    for index, samples in enumerate(dealt):
        assert set((samples // micro_batch % count).astype(int)) <= {index}


@settings(max_examples=25, deadline=None)
@given(num_samples=st.integers(1, 300), block=st.integers(1, 64), prefetch=st.integers(0, 4))
def test_every_row_is_the_sample_it_says(num_samples, block, prefetch):
    source = source_of(num_samples)
    seen = []
    with Feed(source, pass_blocks(num_samples, block, 1), block, prefetch=prefetch) as feed:
        for ready in feed:
            assert np.array_equal(ready.rows["number"].numpy(), ready.samples)
            assert np.array_equal(ready.rows["square"][:, 0].numpy(), ready.samples.astype(np.float32) ** 2)
            seen.extend(ready.samples.tolist())
    assert seen == list(range(num_samples))


def test_buffers_are_reused():
    source = source_of(1000)
    addresses = set()
    with Feed(source, pass_blocks(1000, 10, 1), 10, prefetch=1) as feed:
        for ready in feed:
            addresses.add(ready.rows["number"].data_ptr())
    assert len(addresses) <= 3


def test_error_while_gathering_reaches_the_reader():
    class Broken(ArraySource):
        def gather(self, samples, out, places=None):
            raise OSError("the disk is gone")

    source = Broken({"number": np.arange(10)})
    with Feed(source, pass_blocks(10, 2, 1), 2) as feed, pytest.raises(OSError, match="the disk is gone"):
        next(iter(feed))


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with Feed(source_of(1000), pass_blocks(1000, 1, 1), 1) as feed:
        next(iter(feed))
    assert threading.active_count() == before


def test_waiting_is_reported():
    waits = []
    with Feed(source_of(10), pass_blocks(10, 5, 1), 5, waited=waits.append) as feed:
        assert len(list(feed)) == 2
    assert len(waits) == 3
    assert all(wait >= 0 for wait in waits)


def test_blocks_hold_whole_units():
    source = source_of(10)
    assert samples_per_block(source, 7) % 7 == 0
    assert samples_per_block(source, 7, max_units=3) == 21
    assert samples_per_block(source, 10**9) == 10**9


class Background:
    """Delivers numbers when it is asked to finish, and remembers the order of all calls."""

    def __init__(self, fails_at: int | None = None) -> None:
        self._source, self._fails_at, self.calls = source_of(12), fails_at, []
        self.fields = self._source.fields

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, samples, out, places=None):
        raise AssertionError("the feed begins")

    def begin(self, samples, out, places=None):
        self.calls.append(("begin", int(samples[0])))

        def finish() -> None:
            self.calls.append(("finish", int(samples[0])))
            if samples[0] == self._fails_at:
                raise ValueError("lost")
            self._source.gather(samples, out, places)

        return finish


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_next_block_is_begun_before_the_end_of_one(prefetch):
    source = Background()
    with Feed(source, pass_blocks(12, 3, 1), 3, prefetch=prefetch) as feed:
        found = [block.rows["number"].tolist() for block in feed]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert source.calls[:4] == [("begin", 0), ("begin", 3), ("finish", 0), ("begin", 6)]
    assert source.calls[-1] == ("finish", 9)


def test_a_failure_in_the_background_is_raised_in_its_turn():
    seen = []

    def read() -> None:
        with Feed(Background(fails_at=6), pass_blocks(12, 3, 1), 3) as feed:
            for block in feed:
                seen.append(int(block.samples[0]))

    with pytest.raises(ValueError, match="lost"):
        read()
    assert seen == [0, 3]
