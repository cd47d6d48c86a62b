"""Standard streams that outlive whoever reads them: what cannot be written is dropped, and no write is an error.

A pipe loses its reader, a terminal is closed, the disk behind a redirection fills up: none of it is a reason to end a
training. Both streams are replaced when a command starts, below everything that prints.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from podium.errors import system_reason

_NAMES = {1: "standard output", 2: "standard error"}
_PYTHON_NAMES = {1: "stdout", 2: "stderr"}
#: room may come back; from anything else a stream does not recover
_MAY_RECOVER = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: the reader has gone, which is no fault of the machine
_GONE = {errno.EPIPE: "nobody reads it", errno.EIO: "the terminal is closed"}

#: by stream: why it could not be written for the first time
_failed: dict[int, OSError] = {}
#: told of each stream that fails, once: its number, and a sentence
_listener: Callable[[int, str], None] | None = None
#: whether what is printed on standard output is also on the disk
_results_are_kept = False


def outlive_readers() -> None:
    """Replace both standard streams of this process; those that are captured (in Python) stay as they are."""
    for stream, name in _PYTHON_NAMES.items():
        text = getattr(sys, name)
        if text is not None and not _is_of_system(text, stream):
            continue
        try:
            os.fstat(stream)
        except OSError:  # closed by whoever started this process: the next file opened would take its place
            _discard(stream)
        if text is not None:
            with suppress(OSError, ValueError):
                text.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_LastingFile(stream)),
            encoding=getattr(text, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=stream == 2 or os.isatty(stream),
        )
        setattr(sys, name, lasting)


def on_failure(listener: Callable[[int, str], None]) -> None:
    """Call `listener` with the number of a stream that cannot be written and a sentence, once for each."""
    global _listener
    _listener = listener


def failures() -> list[str]:
    """Return a sentence for each stream that could not be written so far."""
    return [_sentence(stream, error) for stream, error in _failed.items()]


def results_are_kept() -> None:
    """Note that what is printed on standard output is also on the disk: it may be lost without harm."""
    global _results_are_kept
    _results_are_kept = True


def are_results_kept() -> bool:
    """Return whether what is printed on standard output is also on the disk."""
    return _results_are_kept


def lost_results() -> str:
    """Write what is left; return why results on standard output were lost, or nothing.

    It is no loss where they are kept elsewhere, or where their reader has gone.
    """
    for name in _PYTHON_NAMES.values():
        with suppress(OSError, ValueError, AttributeError):
            getattr(sys, name).flush()
    error = _failed.get(1)
    if error is None or _results_are_kept or error.errno in _GONE:
        return ""
    return system_reason(error)


class _LastingFile(io.RawIOBase):
    """One of the system's standard streams, to which every write succeeds."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream

    def isatty(self) -> bool:
        return os.isatty(self._stream)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        while True:
            try:
                return os.write(self._stream, data)
            except BlockingIOError:  # set so by another process that shares the stream
                select.select([], [self._stream], [])
            except OSError as error:
                first = self._stream not in _failed
                if error.errno not in _MAY_RECOVER:
                    _discard(self._stream)  # for libraries and children, too
                if first:
                    _failed[self._stream] = error
                    if _listener is not None:
                        _listener(self._stream, _sentence(self._stream, error))
                return len(data)


def _is_of_system(text: Any, stream: int) -> bool:
    try:
        return bool(text.fileno() == stream)
    except (OSError, ValueError, AttributeError):  # a stream of Python's alone
        return False


def _discard(stream: int) -> None:
    with suppress(OSError):
        discarded = os.open(os.devnull, os.O_WRONLY)
        if discarded != stream:
            os.dup2(discarded, stream)
            os.close(discarded)


def _sentence(stream: int, error: OSError) -> str:
    reason = _GONE.get(error.errno or 0) or system_reason(error)
    return f"{_NAMES[stream]} cannot be written ({reason}): what goes there is dropped"
