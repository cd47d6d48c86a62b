"""A few threads that gather beside the training, for sources whose samples take work: `images.py`, `volumes.py`."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from podium.cores import own_cores
from podium.threads import stay_single


class Background:
    """Starts its threads with the first piece of work; they end with it."""

    def __init__(self, threads: int | None, name: str) -> None:
        self._threads, self._name = threads or len(own_cores()), name
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    def begin(self, count: int, fill: Callable[[slice], None]) -> Callable[[], None]:
        """Lets the threads fill parts that together are `slice(0, count)`, and returns at once; what it returns waits
        for the end, and raises what a thread raised."""
        pool = self._started_pool()
        done = [pool.submit(fill, part) for part in shares(count, self._threads)]

        def finish() -> None:
            wait(done)  # all of them, though one may have failed: they write into buffers that will be used again
            for part in done:
                part.result()

        return finish

    def _started_pool(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, self._name, initializer=stay_single)
            return self._pool


def shares(count: int, threads: int) -> Iterator[slice]:
    """Parts for `threads` threads to take in turn: large ones first, as each costs something, and single samples at
    the end, so that all threads finish at about the same time."""
    first = 0
    while first < count:
        length = max(1, (count - first) // (2 * threads))
        yield slice(first, first + length)
        first += length
