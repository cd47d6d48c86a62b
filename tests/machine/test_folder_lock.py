"""One process at a time in a folder, also where the file system has no locks."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from podium.errors import UserError
from podium.machine.folder_lock import SILENT_S, is_taken, only_here

LINUX = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "prctl"), reason="seccomp is Linux only")
#: has the kernel answer flock with ENOSYS, as Lustre does without `flock`; then holds the folder until its input ends
HOLD = """
import ctypes, errno, pathlib, platform, struct, sys
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

from podium.errors import UserError
from podium.machine.folder_lock import is_taken, only_here
lock = pathlib.Path(sys.argv[1])
try:
    with only_here(lock, "taken"):
        print("in", is_taken(lock), flush=True)
        sys.stdin.read(1)
except UserError as error:
    print(error, is_taken(lock), flush=True)
"""


def without_locks(lock):
    return subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def test_two_do_not_get_in_and_the_next_does(tmp_path):
    lock = tmp_path / ".lock"
    with only_here(lock, "taken"):
        assert is_taken(lock)
        with pytest.raises(UserError, match="taken"), only_here(lock, "taken"):
            pass
    assert not is_taken(lock)


@LINUX
def test_the_same_without_locks_of_the_file_system_and_a_killed_holder_is_followed(tmp_path):
    lock = tmp_path / ".lock"
    with without_locks(lock) as first:
        assert first.stdout.readline() == b"in True\n"
        with without_locks(lock) as second:
            assert second.stdout.readline() == b"taken True\n"
        first.kill()
    with without_locks(lock) as third:
        assert third.stdout.readline() == b"in True\n", "who was killed is gone from this host"
        third.stdin.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


@LINUX
@pytest.mark.parametrize(("silent", "said"), [(0.0, b"taken True\n"), (SILENT_S + 5, b"in True\n")])
def test_a_holder_on_another_host_counts_until_it_is_silent(silent, said, tmp_path):
    claim = tmp_path / ".lock.holder"
    claim.write_text(json.dumps({"host": f"not-{socket.gethostname()}", "process": os.getpid(), "since": 0}))
    os.utime(claim, (time.time() - silent,) * 2)
    with without_locks(tmp_path / ".lock") as process:
        assert process.stdout.readline() == said
        process.stdin.close()
