"""Folders and files that appear whole or not at all, whoever writes them and however that ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from podium.errors import UserError, system_reason


def create_once(folder: Path, fill: Callable[[Path], None], what: str) -> Path:
    """Return `folder`, created by `fill` if it does not exist yet; `what` names its contents in an error.

    Of the processes of a host that need it at the same time, one creates it and the others wait.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                create_folder(folder, fill)
    except OSError as error:
        raise UserError(f"{what} cannot be kept in {folder}: {system_reason(error)}") from error
    return folder


def create_folder(folder: Path, fill: Callable[[Path], None], *, replace: bool = False) -> None:
    """Have `fill` write into a temporary folder beside, then rename that: whoever finds `folder` finds it complete.

    With `replace`, what was there is kept until the new folder is complete, and put back if it cannot take its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        if replace and folder.is_dir():
            _swap(temporary, folder)
            return
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another host was faster, and wrote the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, folder: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old)  # onto an empty folder, which a rename may replace
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def write_files(*paths: Path) -> Iterator[list[Path]]:
    """Yield where to write these files: renamed into place when the block succeeds, and removed otherwise."""
    # Hidden and named after the process, so that nobody takes them for data and two writers do not collide.
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        yield temporary
        for written, path in zip(temporary, paths, strict=True):
            written.replace(path)
    finally:
        for written in temporary:
            with suppress(OSError):  # the folder itself may be the problem
                written.unlink()


@contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Let one process of a host in at a time, so that the others find the work done instead of repeating it."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # file systems without locks: the rename alone keeps it correct
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
