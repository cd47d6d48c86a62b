"""Memory that stays with the process, or does not. Called by `training/build.py` before a model is built, and by
`train.py`.

Every update asks for the same blocks and returns them. glibc's allocator gives large ones back to the system each time,
and taking a page again costs more than many operators do. Where the C library is another one, nothing happens.
"""

import ctypes
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: glibc's numbers of these settings (malloc.h)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
#: blocks up to this size come from the heap, which keeps what is freed; larger ones are rare and go back at once
FROM_HEAP_BYTES = 1 << 30
_GROW_BYTES = 64 << 20


#: where memory is short: larger blocks go back at once
_GIVEN_BACK_BYTES = 1 << 20


@functools.cache
def keep_memory() -> bool:
    """True where the allocator now keeps freed memory for the next update. Changes no result."""
    return _set({_TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROW_BYTES, _MMAP_THRESHOLD: FROM_HEAP_BYTES})


@functools.cache
def give_back_memory() -> bool:
    """The opposite, for those who would rather have the memory. Left alone, glibc keeps blocks of up to 32 MB."""
    return _set({_TRIM_THRESHOLD: _GIVEN_BACK_BYTES, _MMAP_THRESHOLD: _GIVEN_BACK_BYTES})


def return_free_memory() -> None:
    """Give the system what is free now, so that what a process holds is what it uses; later requests take it again."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _set(settings: dict[int, int]) -> bool:
    with suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        return sum(mallopt(setting, value) for setting, value in settings.items()) == len(settings)
    return False


@contextmanager
def settled_objects() -> Iterator[None]:
    """What there is by now is here to stay: Python looks for garbage among what is made from here on.

    Else it goes through all objects of the libraries again and again, some 4 % of mnist's time at micro-batch 8.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
