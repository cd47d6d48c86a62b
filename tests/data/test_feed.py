"""The feed: every row the sample it says, buffers reused, errors and stops handed over."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.feed import Feed
from podium.data.sample_plan import pass_blocks
from podium.data.sources.arrays import ArraySource


def source_of(num_samples: int) -> ArraySource:
    numbers = np.arange(num_samples, dtype=np.int64)
    return ArraySource({"number": numbers, "square": (numbers**2).astype(np.float32)[:, None]})


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
