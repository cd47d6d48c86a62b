"""How much memory an allocator takes from the system for a sequence of requests: more than is in use, since what is
free lies in pieces. A model of glibc's (best fit, neighbours merge) as `machine/allocator.py` sets it up.

Replayed for estimates of memory; real requests never come here.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from podium.machine.allocator import FROM_HEAP_BYTES

#: what an aligned request of torch asks for beside the block, and the block's own header, as in glibc's memalign
_AROUND_BYTES, _HEADER_BYTES = 96, 16

#: bytes of a block that is requested; or, below 0, the place in the sequence of the request that is returned, less one
Requests = Sequence[int]


@dataclass
class Heap:
    """A heap that grows at its end and keeps what is returned."""

    #: bytes from the system now, and at most so far
    size: int = 0
    most: int = 0
    _apart: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)  # (size, begin), sorted
    _begins: dict[int, int] = field(default_factory=dict)  # size of the free block that begins there
    _ends: dict[int, int] = field(default_factory=dict)  # begin of the free block that ends there

    def take(self, num_bytes: int) -> tuple[int, int]:
        """Return (begin, size) of a new block."""
        if num_bytes >= FROM_HEAP_BYTES:
            self._apart += num_bytes
            self._measure()
            return -1, num_bytes
        size = -(-(num_bytes + _HEADER_BYTES) // 16) * 16
        at = bisect_left(self._free, (size + _AROUND_BYTES, 0))
        if at < len(self._free):
            found, begin = self._free[at]
            self._forget(begin, found)
            self._keep_free(begin + size, found - size)
            return begin, size
        begin = self._ends.get(self.size, self.size)
        if begin < self.size:
            self._forget(begin, self.size - begin)
        self.size = begin + size
        self._measure()
        return begin, size

    def give(self, block: tuple[int, int]) -> None:
        """Return a block, which merges with its free neighbours."""
        begin, size = block
        if begin < 0:
            self._apart -= size
            return
        if (after := self._begins.get(begin + size)) is not None:
            self._forget(begin + size, after)
            size += after
        if (before := self._ends.get(begin)) is not None:
            self._forget(before, begin - before)
            begin, size = before, begin + size - before
        self._keep_free(begin, size)

    def replay(self, requests: Requests) -> None:
        """Take and return blocks; those that are not returned by the sequence are returned at its end."""
        taken: dict[int, tuple[int, int]] = {}
        for place, request in enumerate(requests):
            if request >= 0:
                taken[place] = self.take(request)
            else:
                self.give(taken.pop(-request - 1))
        for block in taken.values():
            self.give(block)

    def _measure(self) -> None:
        self.most = max(self.most, self.size + self._apart)

    def _keep_free(self, begin: int, size: int) -> None:
        if size > 0:
            insort(self._free, (size, begin))
            self._begins[begin], self._ends[begin + size] = size, begin

    def _forget(self, begin: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, begin))]
        del self._begins[begin], self._ends[begin + size]
