"""One process at a time in a folder, on any file system that several hosts may share.

The system's own lock (flock) is taken where there is one: it goes with the process, however that ends, and NFS hands it
to the server. Where the file system has none (NFS without a lock service, Lustre without `flock`), a file that can be
made only once says who works here, and its time is renewed; who is silent for `SILENT_S`, or gone from this host, has
left.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from podium.errors import UserError, writing
from podium.machine.bounded_files import append_regular, open_regular, parse_mapping, read_limited, write_new

BEAT_S = 5.0
SILENT_S = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MAX_CLAIM_BYTES = 4096


@contextmanager
def only_here(lock: Path, taken: str) -> Iterator[None]:
    """Keep other processes out while inside; raise a UserError that says `taken` where one is in."""
    with writing(lock):
        file = append_regular(lock)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(taken) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with _claimed(_claim_of(lock), taken):
                yield
            return
        yield


def is_taken(lock: Path) -> bool:
    """Return whether a process is in the folder."""
    try:
        with open_regular(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:  # locked, or not ours to look at
        if error.errno not in _NO_LOCKS:
            return True
        return _is_alive(_claim_of(lock), time.time())
    return False


def _claim_of(lock: Path) -> Path:
    return lock.with_name(f"{lock.name}.holder")


@contextmanager
def _claimed(claim: Path, taken: str) -> Iterator[None]:
    """Hold the file that says who is in the folder, and renew its time."""
    me = _me()
    own = claim.with_name(f"{claim.name}.{me['host']}-{me['process']}")
    with writing(claim):
        write_new(own, [json.dumps(me).encode()])
        try:
            # Its time is that of the file system, whatever the clocks of the hosts say.
            _make_claim(own, claim, own.stat().st_mtime, taken)
        finally:
            own.unlink(missing_ok=True)
    left = threading.Event()
    beat = threading.Thread(target=_renew, args=(claim, left), name="folder-lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        left.set()
        beat.join()
        claim.unlink(missing_ok=True)


def _make_claim(own: Path, claim: Path, now: float, taken: str) -> None:
    """Link `own` as the claim, which NFS does for one process only; take the place of one that has left."""
    for _ in range(2):
        with suppress(FileExistsError):
            os.link(own, claim)
            return
        found = _holder(claim)
        if _is_alive(claim, now):
            raise UserError(taken)
        aside = own.with_name(f"{own.name}.old")
        with suppress(FileNotFoundError):
            claim.rename(aside)  # of several who find it old, one succeeds
            if _holder(aside) != found:  # somebody else has taken its place meanwhile
                with suppress(FileExistsError):
                    os.link(aside, claim)
            aside.unlink()
    raise UserError(taken)


def _renew(claim: Path, left: threading.Event) -> None:
    while not left.wait(BEAT_S):
        with suppress(OSError):
            os.utime(claim)


def _me() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": socket.gethostname(), "process": process.pid, "since": process.create_time()}


def _holder(claim: Path) -> dict[str, Any]:
    try:
        return parse_mapping(read_limited(claim, _MAX_CLAIM_BYTES))
    except (OSError, ValueError):
        return {}


def _is_alive(claim: Path, now: float) -> bool:
    """Return whether the process of a claim is at work: known of this host, else by how long it has been silent."""
    try:
        silent = now - claim.stat().st_mtime
    except OSError:
        return False
    holder = _holder(claim)
    if holder.get("host") == socket.gethostname() and isinstance(holder.get("process"), int):
        with suppress(psutil.Error, ValueError, OverflowError):
            return bool(psutil.Process(holder["process"]).create_time() == holder.get("since"))
        return False
    return silent < SILENT_S
