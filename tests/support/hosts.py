"""Two hosts: network namespaces joined by a pair of virtual cables, made and removed by the test itself."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Started
from tests.support.warm import WARM, WarmProcess

#: what the hosts call each other
HOSTS = ("10.77.0.1", "10.77.0.2")
SPREAD = ["--hosts", ",".join(HOSTS), "--instances", 2]


def ip(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *args], capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], tuple[str, str]]]:
    """Names of two namespaces that see each other as 10.77.0.1 and 10.77.0.2, and nothing else; and of their cables."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` (iproute2) is not installed")
    mark = uuid.uuid4().hex[:6]
    names = [f"podium-{mark}-{letter}" for letter in "ab"]
    ends = (f"va{mark}", f"vb{mark}")
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ready = ip("-n", name, "link", "set", end, "up")
            if ready.returncode:
                pytest.skip(f"virtual cables cannot be made here: {ready.stderr.strip()}")
        yield names, ends
    finally:
        for name in names:
            ip("netns", "delete", name)


def inside(name: str, *command: object) -> list[str]:
    """The command that runs `command` on a host."""
    return ["ip", "netns", "exec", name, *map(str, command)]


def on_host(
    name: str, cwd: Path, *args: object, env: dict[str, str] | None = None, before: tuple[str, ...] | None = None
) -> Started:
    """`podium ARGS` on a host; from the start of Python on behind the command `before`, or none: an empty tuple."""
    errors = cwd / f"stderr-{time.monotonic_ns()}"
    with errors.open("wb") as file, Path(os.devnull).open("w") as nothing:
        process: subprocess.Popen | WarmProcess
        if before is None:
            process = WARM.start(args, cwd, nothing.fileno(), file.fileno(), env, host=name)
        else:
            command = inside(name, *before, sys.executable, "-m", "podium", *args)
            process = subprocess.Popen(command, cwd=cwd, stdout=nothing, stderr=file, env={**os.environ, **(env or {})})
    return Started(process, errors)


def both(names: list[str], cwd: Path, *args: object) -> list[Started]:
    return [on_host(name, cwd, *args, *SPREAD, "--join") for name in names]


def ended(started: Started | subprocess.Popen, timeout: float = 150) -> tuple[int, str]:
    """Its exit code and what it has said."""
    if isinstance(started, Started):
        return started.process.wait(timeout), started.stderr
    _, errors = started.communicate(timeout=timeout)
    return started.returncode, errors
