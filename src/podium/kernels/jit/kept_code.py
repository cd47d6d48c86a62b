"""Machine code of routines, kept on disk for later processes. Called by `routine.py`.

A folder for each version of the kernels, LLVM and processor, with a file for each routine: a checksum of all that
follows, a number, the object code. Running it is running a program, so only folders and files count that belong to this
user, and that nobody else may write to. Where nothing can be kept, every process compiles for itself.
"""

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from podium.machine.atomic_files import write_files
from podium.machine.bounded_files import read_limited, write_new
from podium.machine.cache_folder import cache_folder

_MOST_BYTES = 8 << 20
#: folders of other versions that stay, the newest ones
_OTHER_VERSIONS = 7
_NUMBER_BYTES = 8


@dataclass(frozen=True)
class Kept:
    """A compiled routine."""

    object_code: bytes
    #: elements of scratch memory that each piece needs
    num_scratch: int


def load(version: str, name: str) -> Kept | None:
    """Return what was kept under this name; None where nothing was, or nothing that can be trusted."""
    folder = _folder(version)
    path = folder / name
    try:
        if not (_is_own(folder.parent) and _is_own(folder) and _is_own(path)):
            return None
        content = read_limited(path, _MOST_BYTES)
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, rest = content[:size], content[size:]
    if len(rest) <= _NUMBER_BYTES or hashlib.sha256(rest).digest() != digest:
        return None
    return Kept(rest[_NUMBER_BYTES:], int.from_bytes(rest[:_NUMBER_BYTES], "little"))


def keep(version: str, name: str, code: Kept) -> None:
    """Keep compiled code for later processes, if that is possible."""
    folder = _folder(version)
    with suppress(OSError):
        if not folder.is_dir():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _forget_others(folder)
        if _is_own(folder.parent) and _is_own(folder):
            rest = code.num_scratch.to_bytes(_NUMBER_BYTES, "little") + code.object_code
            with write_files(folder / name) as (temporary,):
                write_new(temporary, [hashlib.sha256(rest).digest(), rest])
                temporary.chmod(0o600)


def _folder(version: str) -> Path:
    return cache_folder("kernels", version)


def _is_own(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and others cannot change it; a link to one does not."""
    status = path.lstat()
    kind_known = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return kind_known and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _forget_others(folder: Path) -> None:
    others = [path for path in folder.parent.iterdir() if path != folder]
    others.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in others[_OTHER_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)
