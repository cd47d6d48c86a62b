"""A pool of threads that gathers beside the training, for sources whose samples take work to prepare.

Used by `data/images/source.py` and `data/volumes/crops.py`.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from podium.machine.cores import own_cores
from podium.machine.threads import stay_single


class GatherPool:
    """Threads that start with the first piece of work and end with the pool."""

    def __init__(self, threads: int | None, name: str) -> None:
        self._threads, self._name = threads or len(own_cores()), name
        self._executor: ThreadPoolExecutor | None = None
        self._start_lock = threading.Lock()

    def begin(self, count: int, fill: Callable[[slice], None]) -> Callable[[], None]:
        """Have the threads call `fill` on slices that together are `slice(0, count)`, and return at once.

        Calling the result waits for the end and raises what a thread raised.
        """
        executor = self._started()
        done = [executor.submit(fill, part) for part in work_slices(count, self._threads)]

        def finish() -> None:
            wait(done)  # for all, even if one has failed: they write into buffers that will be reused
            for part in done:
                part.result()

        return finish

    def _started(self) -> ThreadPoolExecutor:
        with self._start_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, self._name, initializer=stay_single)
            return self._executor


def work_slices(count: int, threads: int) -> Iterator[slice]:
    """Yield slices for `threads` threads to take in turn: long ones first, since each has a cost of its own, and
    single samples at the end, so that all threads finish at about the same time."""
    first = 0
    while first < count:
        length = max(1, (count - first) // (2 * threads))
        yield slice(first, first + length)
        first += length
