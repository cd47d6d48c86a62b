"""The binary tree over replicas, and how its leaves are dealt to instances. Pure; needs no torch.

    sum(lo, hi) = sum(lo, mid) + sum(mid, hi),   mid = lo + (hi - lo + 1) // 2

The shape of the tree depends on the number of replicas alone; dealing only decides who makes which addition. A range
that is a node of the tree is a *subtree*. Instances have contiguous blocks of replicas; a block is one subtree, or
several, which its instance adds up one by one and others join:

    8 replicas on 3 instances:   0 1 2 | 3 4 5 | 6 7   ->   [0 1] [2] | [3] [4 5] | [6 7]
"""

from collections.abc import Sequence
from functools import cache

#: how sums are joined: the index of one, or the two sides of an addition
Join = int | tuple["Join", "Join"]


def middle(lo: int, hi: int) -> int:
    """Return where the tree divides a range: into two halves, of which the left one is larger if the length is odd."""
    return lo + (hi - lo + 1) // 2


@cache
def deal(num_replicas: int, num_blocks: int) -> tuple[range, ...]:
    """Return contiguous blocks of replicas whose sizes differ by at most one, cut where the tree is cut if possible.

    For a power of two of blocks, all of them are subtrees; for other numbers, they have as few subtrees as possible.
    """
    assert 1 <= num_blocks <= num_replicas
    return tuple(_dealt(0, num_replicas, num_blocks))


def _dealt(lo: int, hi: int, num_blocks: int) -> list[range]:
    if num_blocks == 1:
        return [range(lo, hi)]
    if num_blocks % 2 == 0:
        mid = middle(lo, hi)
        return _dealt(lo, mid, num_blocks // 2) + _dealt(mid, hi, num_blocks // 2)
    small, num_large = divmod(hi - lo, num_blocks)
    # By the number of larger blocks so far: the fewest subtrees, and the sizes with which they are reached.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for done in range(num_blocks):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for larger, (cost, sizes) in best.items():
            start = lo + done * small + larger
            for more in (1, 0):
                left = num_large - larger - more
                if 0 <= left <= num_blocks - done - 1:
                    size = small + more
                    reached = cost + _num_subtrees(lo, hi, start, start + size)
                    if larger + more not in following or reached < following[larger + more][0]:
                        following[larger + more] = (reached, (*sizes, size))
        best = following
    blocks, start = [], lo
    for size in best[num_large][1]:
        blocks.append(range(start, start + size))
        start += size
    return blocks


def _num_subtrees(lo: int, hi: int, start: int, stop: int) -> int:
    return len(_subtrees(lo, hi, start, stop))


def subtrees(block: range, num_replicas: int) -> list[range]:
    """Return the largest subtrees inside a block, in order."""
    return _subtrees(0, num_replicas, block.start, block.stop)


def _subtrees(lo: int, hi: int, start: int, stop: int) -> list[range]:
    if start <= lo and hi <= stop:
        return [range(lo, hi)]
    if stop <= lo or hi <= start:
        return []
    mid = middle(lo, hi)
    return _subtrees(lo, mid, start, stop) + _subtrees(mid, hi, start, stop)


def join_order(parts: Sequence[range], whole: range) -> Join:
    """Return how sums over `parts` are joined to that over `whole`: subtrees that make up a subtree, in order."""
    return _joined({part: index for index, part in enumerate(parts)}, whole.start, whole.stop)


def _joined(index: dict[range, int], lo: int, hi: int) -> Join:
    if (found := index.get(range(lo, hi))) is not None:
        return found
    assert hi - lo > 1, "the parts do not make up the whole"
    mid = middle(lo, hi)
    return _joined(index, lo, mid), _joined(index, mid, hi)


def spread(num: int, over: int) -> tuple[int, ...]:
    """Return how many of `num` things each of `over` gets: the same number, or one more for the first ones."""
    return tuple(num // over + (place < num % over) for place in range(over))


# --- replicas that share statistics ---------------------------------------------------------------------------------


def span_fits(span: int, num_replicas: int, num_blocks: int) -> bool:
    """Return whether blocks leave aligned spans of replicas whole, or divide them into subtrees of their own.

    `span` is a power of two that divides the replicas. Replicas of a span run side by side, so a block must not end
    within one span and go on into the next.
    """
    for block in deal(num_replicas, num_blocks):
        first, last = block.start // span, (block.stop - 1) // span
        if first != last and (block.start % span or block.stop % span):
            return False
        if first == last and len(subtrees(range(block.start % span, block.start % span + len(block)), span)) > 1:
            return False
    return True
