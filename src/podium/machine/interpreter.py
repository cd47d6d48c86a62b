"""The start and the end of a command's process, without work of Python's own that a person would wait for.

While libraries are loaded, Python looks for garbage among their hundreds of thousands of objects again and again, and
at the end it takes them apart one by one: together as long as half of the import of torch.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def loading() -> Iterator[None]:
    """Look for no garbage while libraries are loaded, nor later among what they have made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class QuickEnd:
    """The end of this process once everything registered since has run: its threads joined, its streams flushed.

    What the system takes back in one piece anyway is not taken apart before. Without a `code` Python ends as usual.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)  # the first to be registered is the last to run

    def _end(self) -> None:
        if self.code is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
                    stream.flush()
            os._exit(self.code)
