"""Two hosts: network namespaces joined by a pair of virtual cables, made and removed by the test itself."""

import os
import shutil
import subprocess
import sys
import time
import uuid

import pytest

from podium.run import Run
from tests.faults.test_lost_instances import recipe_of, undisturbed  # noqa: F401  (a fixture)
from tests.processes import until

pytestmark = pytest.mark.slow

HOSTS = ("10.77.0.1", "10.77.0.2")


def ip(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *args], capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two namespaces that see each other as 10.77.0.1 and 10.77.0.2, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` (iproute2) is not installed")
    mark = uuid.uuid4().hex[:6]
    names = [f"podium-{mark}-{letter}" for letter in "ab"]
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip(
            "link",
            "add",
            f"va{mark}",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"vb{mark}",
            "netns",
            names[1],
        )
        for name, end, address in zip(names, (f"va{mark}", f"vb{mark}"), HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ready = ip("-n", name, "link", "set", end, "up")
            if ready.returncode:
                pytest.skip(f"virtual cables cannot be made here: {ready.stderr.strip()}")
        yield names, (f"va{mark}", f"vb{mark}")
    finally:
        for name in names:
            ip("netns", "delete", name)


def on_host(name: str, cwd, *args: object, env: dict | None = None) -> subprocess.Popen:
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "podium", *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )


def both(names, cwd, *args: object) -> list[subprocess.Popen]:
    spread = ["--hosts", ",".join(HOSTS), "--instances", 2, "--join"]
    return [on_host(name, cwd, *args, *spread) for name in names]


def ended(process: subprocess.Popen, timeout: float = 150) -> tuple[int, str]:
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, errors


def sentence(errors: str) -> str:
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("podium: ")]
    return line


def test_two_hosts_train_to_the_same_weights_as_one_and_a_cut_link_is_survived(hosts, tmp_path, undisturbed):  # noqa: F811
    names, ends = hosts
    run = Run(tmp_path / "run")
    args = ["train", *recipe_of("mnist"), "train.length=60up", "launch.timeout=8", "--out", "run"]
    processes = both(names, tmp_path, *args)
    until(lambda: run.metrics_file.exists() and run.metrics_file.read_bytes().count(b"\n") >= 4, "records")
    listening = subprocess.run(["ip", "netns", "exec", names[0], "ss", "-Hltn"], capture_output=True, text=True).stdout
    assert all(line.split()[3].startswith(HOSTS[0]) for line in listening.splitlines()), listening
    cut = time.monotonic()
    ip("-n", names[0], "link", "set", ends[0], "down")
    results = [ended(process) for process in processes]
    assert time.monotonic() - cut < 60
    for (code, errors), other in zip(results, reversed(HOSTS), strict=True):
        assert code == 3, errors
        assert other in sentence(errors)
    ip("-n", names[0], "link", "set", ends[0], "up")
    results = [ended(process) for process in both(names, tmp_path, "resume", "run")]
    assert [code for code, _ in results] == [0, 0], results
    assert run.summary()["weights_sha256"] == undisturbed("mnist")
    assert run.summary()["topology"]["hosts"] == 2


def test_a_host_that_never_joins_is_named(hosts, tmp_path):
    names, _ = hosts
    args = ["train", *recipe_of("mnist"), "launch.timeout=5", "--hosts", ",".join(HOSTS), "--instances", 2, "--join"]
    code, errors = ended(on_host(names[0], tmp_path, *args, "--out", "run"))
    assert code == 2, errors
    assert f"{HOSTS[1]} has not joined within 5 s" in sentence(errors)
    code, errors = ended(on_host(names[1], tmp_path, *args, "--out", "run"))
    assert code == 2
    assert f"{HOSTS[0]}:29400, where the hosts meet, did not answer within 5 s" in sentence(errors)
    assert not (tmp_path / "run").exists()


def test_different_recipes_on_two_hosts_are_one_sentence_on_each(hosts, tmp_path):
    names, _ = hosts
    spread = ["launch.timeout=20", "--hosts", ",".join(HOSTS), "--instances", 2, "--join", "--out", "run"]
    processes = [on_host(name, tmp_path, "train", *recipe_of("mnist"), f"seed={seed}", *spread)
                 for seed, name in enumerate(names)]  # fmt: skip
    for code, errors in map(ended, processes):
        assert code == 2, errors
        assert "recipes differ" in sentence(errors)
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_one_sentence(hosts, tmp_path):
    names, _ = hosts
    hold = "import socket,time; s=socket.create_server(('10.77.0.1', 29400)); print('held', flush=True); time.sleep(99)"
    with subprocess.Popen(
        ["ip", "netns", "exec", names[0], sys.executable, "-c", hold], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout.readline()
            args = [
                "train",
                *recipe_of("mnist"),
                "--hosts",
                ",".join(HOSTS),
                "--instances",
                2,
                "--join",
                "--out",
                "run",
            ]
            code, errors = ended(on_host(names[0], tmp_path, *args))
        finally:
            holder.kill()
    assert code == 2, errors
    assert "port 29400 of 10.77.0.1 cannot be used (Address already in use)" in sentence(errors)
