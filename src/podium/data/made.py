"""Data that is made once and kept: there whole or not at all, whoever makes it and however that ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from podium.errors import UserError, system_reason


def made_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """`folder`, filled by `make` if it is not there yet; `what` names its contents where that fails.

    Of the processes of a host that want it at the same time, one makes it and the others wait.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                write_aside(folder, make)
    except OSError as error:
        raise UserError(f"{what} cannot be kept in {folder}: {system_reason(error)}.") from error
    return folder


def write_aside(folder: Path, make: Callable[[Path], None]) -> None:
    """Lets `make` fill a folder beside, and puts it in place by one rename: who finds it finds it complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(aside)
        aside.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody on another host was faster, and made the same
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def files_aside(*paths: Path) -> Iterator[list[Path]]:
    """Where to write these files: put in place together when the block ends well, and removed otherwise."""
    # Hidden and named after the process, so that nobody takes them for data and two writers do not meet.
    aside = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        yield aside
        for written, path in zip(aside, paths, strict=True):
            written.replace(path)
    finally:
        for written in aside:
            with suppress(OSError):  # the folder may be what is wrong
                written.unlink()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Lets one process of a host in at a time, so that the others find the work done instead of repeating it."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # file systems without locks: the rename alone keeps it correct
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
