"""Files that others may have written: opened without waiting, regular files only, read up to a limit.

A named pipe would make a reader wait for ever, a device or a file of terabytes would fill the memory. Whatever is wrong
is an OSError whose text fits into a sentence (`errors.system_reason`); `read_mapping` raises a UserError.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podium.errors import UserError, system_reason

#: the most that is read of a file with a few facts, and how deeply these may be nested
FACTS_BYTES = 4 << 20
_MAX_DEPTH = 64
_CHUNK_BYTES = 1 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; raise OSError at once if it is anything else than a file or a link to one."""
    _check_regular(path.stat())  # looked at before: opening a device may do something
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    return _checked(handle, "rb")


def append_regular(path: Path) -> io.FileIO:
    """Open a file for writing at its end, created where there is none, each write handed to the system at once."""
    if path.exists():
        _check_regular(path.stat())
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    return _checked(os.open(path, flags, 0o666), "ab", buffering=0)


def write_new(path: Path, parts: Iterable[bytes]) -> None:
    """Write a new file in place of whatever has its name: never into a pipe, a device or where a link leads."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        for part in parts:
            file.write(part)


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`; raise OSError if it is longer or no file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        parts = [file.read(size)] if size <= max_bytes else []
        # Files of the system say that they are empty, and others may be growing.
        while size <= max_bytes and (more := file.read(_CHUNK_BYTES)):
            parts.append(more)
            size = max(size, sum(map(len, parts)))
    if size > max_bytes:
        raise OSError(errno.EINVAL, f"it has more than the {max_bytes:,} bytes that are read of such a file")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_mapping(path: Path, advice: str, max_bytes: int = FACTS_BYTES) -> dict[str, Any] | None:
    """Return the mapping of a JSON file, None where there is no such file; a UserError ends with `advice`."""
    try:
        return parse_mapping(read_limited(path, max_bytes))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}; {advice}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {advice}") from None


def parse_mapping(data: bytes) -> dict[str, Any]:
    """Return the mapping that JSON text in UTF-8 holds; raise ValueError with the reason if it holds none."""
    try:
        value = json.loads(data.decode("utf-8"))
        nested = _is_nested(value, _MAX_DEPTH)
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    except RecursionError:
        nested = True
    except ValueError:  # also of numbers with thousands of digits
        raise ValueError("it is not JSON") from None
    if nested:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    if not isinstance(value, dict):
        raise ValueError("it does not hold a mapping")
    return value


def _is_nested(value: object, depth: int) -> bool:
    """Return whether a value has lists and mappings on more than `depth` levels."""
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        _is_nested(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


def _checked(handle: int, mode: str, buffering: int = -1) -> Any:
    try:
        _check_regular(os.fstat(handle))  # again: it may have changed in between
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, mode, buffering)
