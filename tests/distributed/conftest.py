"""Two hosts: network namespaces joined by a pair of virtual cables, made and removed by the test itself."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podium.recipe import load_recipe
from podium.train import train

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


@pytest.fixture(scope="session")
def weights_alone(tmp_path_factory) -> Callable[[list[str]], str]:
    """weights_sha256 of a recipe with its overrides, trained in this process and nowhere else."""
    known: dict[tuple[str, ...], str] = {}

    def weights(recipe: list[str]) -> str:
        if tuple(recipe) not in known:
            name, *overrides = recipe
            run = train(load_recipe(name, overrides), tmp_path_factory.mktemp("alone") / "run")
            known[tuple(recipe)] = run.summary()["weights_sha256"]
        return known[tuple(recipe)]

    return weights


def inside(name: str, *command: object) -> list[str]:
    """The command that runs `command` on a host."""
    return ["ip", "netns", "exec", name, *map(str, command)]


def on_host(
    name: str, cwd: Path, *args: object, env: dict[str, str] | None = None, before: tuple[str, ...] = ()
) -> subprocess.Popen:
    """`podium ARGS` on a host, behind the command `before` if there is one."""
    return subprocess.Popen(
        inside(name, *before, sys.executable, "-m", "podium", *args),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def both(names: list[str], cwd: Path, *args: object) -> list[subprocess.Popen]:
    return [on_host(name, cwd, *args, *SPREAD, "--join") for name in names]


def ended(process: subprocess.Popen, timeout: float = 150) -> tuple[int, str]:
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, errors


def sentence(errors: str) -> str:
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("podium: ")]
    return line
