"""The feed: every sample where it belongs, buffers reused, errors and stops handed over."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.arrays import ArraySource
from podium.data.feed import Feed, pass_blocks, samples_per_block, train_blocks


def source_of(num_samples: int) -> ArraySource:
    numbers = np.arange(num_samples, dtype=np.int64)
    return ArraySource({"number": numbers, "square": (numbers**2).astype(np.float32)[:, None]})


@given(
    num_samples=st.integers(1, 200),
    global_batch=st.integers(1, 50),
    first=st.integers(0, 30),
    num_updates=st.integers(0, 40),
    per_block=st.integers(1, 9),
)
def test_blocks_are_the_same_samples_whatever_their_size_and_wherever_one_starts(
    num_samples, global_batch, first, num_updates, per_block
):
    if global_batch > num_samples:
        return
    common = {"seed": 3, "num_samples": num_samples, "global_batch": global_batch, "share": slice(None)}
    last = first + num_updates
    one_by_one = train_blocks(**common, first_update=0, last_update=last, updates_per_block=1)
    expected = np.array(list(one_by_one), dtype=np.int64).reshape(-1)[first * global_batch :]
    blocks = train_blocks(**common, first_update=first, last_update=last, updates_per_block=per_block)
    assert np.array_equal(np.concatenate([*blocks, np.array([], np.int64)]), expected)


def test_shares_of_instances_make_up_the_whole_batch():
    common = {
        "seed": 3,
        "num_samples": 100,
        "global_batch": 12,
        "first_update": 0,
        "last_update": 20,
        "updates_per_block": 1,
    }
    whole = list(train_blocks(**common, share=slice(None)))
    parts = [list(train_blocks(**common, share=slice(start, start + 4))) for start in (0, 4, 8)]
    for update, block in enumerate(whole):
        assert np.array_equal(block, np.concatenate([part[update] for part in parts]))


def test_an_epoch_holds_no_sample_twice_and_epochs_differ():
    blocks = list(
        train_blocks(
            seed=1,
            num_samples=103,
            global_batch=10,
            share=slice(None),
            first_update=0,
            last_update=20,
            updates_per_block=4,
        )
    )
    samples = np.concatenate(blocks)
    first, second = samples[:100], samples[100:]
    assert len(set(first)) == len(set(second)) == 100
    assert not np.array_equal(first, second)


@settings(max_examples=25, deadline=None)
@given(num_samples=st.integers(1, 300), block=st.integers(1, 64), prefetch=st.integers(0, 4))
def test_every_row_is_the_sample_it_says(num_samples, block, prefetch):
    source = source_of(num_samples)
    seen = []
    with Feed(source, pass_blocks(num_samples, block), block, prefetch=prefetch) as feed:
        for ready in feed:
            assert np.array_equal(ready.rows["number"].numpy(), ready.samples)
            assert np.array_equal(ready.rows["square"][:, 0].numpy(), ready.samples.astype(np.float32) ** 2)
            seen.extend(ready.samples.tolist())
    assert seen == list(range(num_samples))


def test_buffers_are_reused():
    source = source_of(1000)
    addresses = set()
    with Feed(source, pass_blocks(1000, 10), 10, prefetch=1) as feed:
        for ready in feed:
            addresses.add(ready.rows["number"].data_ptr())
    assert len(addresses) <= 3


def test_error_while_gathering_reaches_the_reader():
    class Broken(ArraySource):
        def gather(self, samples, out):
            raise OSError("the disk is gone")

    source = Broken({"number": np.arange(10)})
    with Feed(source, pass_blocks(10, 2), 2) as feed, pytest.raises(OSError, match="the disk is gone"):
        next(iter(feed))


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with Feed(source_of(1000), pass_blocks(1000, 1), 1) as feed:
        next(iter(feed))
    assert threading.active_count() == before


def test_waiting_is_reported():
    waits = []
    with Feed(source_of(10), pass_blocks(10, 5), 5, waited=waits.append) as feed:
        assert len(list(feed)) == 2
    assert len(waits) == 3
    assert all(wait >= 0 for wait in waits)


def test_blocks_hold_whole_units():
    source = source_of(10)
    assert samples_per_block(source, 7) % 7 == 0
    assert samples_per_block(source, 7, max_units=3) == 21
    assert samples_per_block(source, 10**9) == 10**9
