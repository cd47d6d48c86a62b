"""Folders that only this user can enter, for what a launch needs while it lasts: notes, early logs, the socket.

All are in one place. One whose owner has died is removed by the next launch.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from podium.errors import UserError, system_reason
from podium.machine.cache_folder import cache_folder


def private_folder() -> Path:
    """Return the one place, made where it is missing: below the system's temporary folder, else in the cache.

    Anybody can make a folder of that name in a temporary folder, so one is taken only if it is the user's own. The
    runtime folder of the session is none: it is removed at logout, when a run may go on.
    """
    name = f"podium-{os.getuid()}"
    reasons = []
    for path in (Path(tempfile.gettempdir()) / name, cache_folder(name)):
        try:
            with suppress(FileExistsError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700)
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return path
            reasons.append(f"{path} is not a folder that only you can enter")
        except OSError as error:
            reasons.append(f"{path}: {system_reason(error)}")
    raise UserError(f"{reasons[0]}: remove it, or set TMPDIR to a folder of your own")


@contextmanager
def launch_folder(name: str | None = None) -> Iterator[Path]:
    """Make a folder for as long as entered, and remove those that others have left behind.

    `name`: one that others know; of itself the name is a new one.
    """
    place = private_folder()
    with _locked(place, fcntl.LOCK_EX):  # between making and locking a folder, nobody may take it for a stale one
        _remove_stale(place)
        if name is None:
            path = Path(tempfile.mkdtemp(prefix="launch-", dir=place))
        else:
            path = place / name
            path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def is_in_use(path: Path) -> bool:
    """Return whether the process that has made a launch's folder still lives."""
    try:
        with _locked(path, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, kind)
        yield
    finally:
        os.close(file)


def _remove_stale(place: Path) -> None:
    """Remove folders that no process has locked: the system takes the lock from one that ends, however it ends."""
    for path in place.glob("launch-*"):
        with suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path, ignore_errors=True)
