"""The model of an allocator: never less than what is in use, and what is returned is used again."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from podium.machine.heap import Heap

MB = 1 << 20


def test_blocks_that_are_returned_are_used_again():
    heap = Heap()
    for _ in range(5):
        heap.replay([8 * MB, 4 * MB, -1, 2 * MB, -2])
    assert 12 * MB <= heap.most < 12.1 * MB


def test_a_block_that_stays_keeps_others_apart():
    heap = Heap()
    first = heap.take(10 * MB)
    heap.take(64)
    heap.give(first)
    heap.take(11 * MB)  # does not fit where the first one was
    assert heap.most > 21 * MB


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 22), st.integers(0, 100)), max_size=60))
def test_it_is_never_smaller_than_what_is_in_use(steps):
    heap, blocks = Heap(), []
    most = 0
    for gives, size, which in steps:
        if gives and blocks:
            heap.give(blocks.pop(which % len(blocks))[0])
        else:
            blocks.append((heap.take(size), size))
        most = max(most, sum(size for _, size in blocks))
        places = sorted(block for block, _ in blocks)
        assert all(begin + size <= after for (begin, size), (after, _) in pairwise(places))
    assert most <= heap.most
