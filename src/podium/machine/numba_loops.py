"""Loops compiled by numba, and plain threads that run them on several cores: the simulators are built on them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import extending, njit

from podium.machine.cores import own_cores
from podium.machine.threads import stay_single

#: typed for those who call what it decorates: numba itself passes the first argument
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = extending.intrinsic


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function on its first call and keep the result on disk, next to its file or in the user's cache.

    What it calls in other files is compiled into it: numba does not notice when only those files change.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # neither can be written to
            return njit(nogil=True, **options)(function)

    return wrap


def on_cores(
    run: Callable[[int, int], Any], count: int, threads: int | None = None, *, parts_per_thread: int = 4
) -> None:
    """Call `run(start, stop)` over parts of range(count), by default on all cores; raise what a part raised.

    Python threads over functions that release the interpreter lock: unlike numba's own parallel loops they need no
    threading layer, may be used from several threads, and survive a fork. Torch's operators in `run` start no further
    threads: even a single part runs in a thread of its own, as it would among others. With several parts per thread,
    a thread that finishes early takes another.
    """
    if count == 0:
        return
    threads = min(threads or len(own_cores()), count)
    num_parts = min(count, threads * parts_per_thread)
    edges = [count * part // num_parts for part in range(num_parts + 1)]
    with ThreadPoolExecutor(threads, initializer=stay_single) as pool:
        for _ in pool.map(run, edges[:-1], edges[1:]):
            pass
