"""Attacks on a run by those who are not part of it: they get nowhere, are told once, and the run ends as it would have.

What is put into torch's store here is what its rendezvous would unpickle, and so run.
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, SPREAD, both, ended, inside, ip, on_host
from tests.support.processes import Started, num_records, sentence, started, until
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

#: a machine beside the two hosts, on their network
STRANGER = "10.77.0.3"
NOBODY = 65534

#: poses as a host that is missing: as torch's store would have it, and by shouting
ATTACK = """
import base64, contextlib, pickle, socket, sys
from datetime import timedelta
import torch.distributed as dist

address, port, marker = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Payload:
    def __reduce__(self):
        return (open, (marker, "w"))

for shout in (b"", bytes(64), pickle.dumps(Payload()) + bytes(64)):
    with contextlib.suppress(OSError):
        with socket.create_connection((address, port), timeout=5, source_address=(sys.argv[4], 0)) as stranger:
            stranger.sendall(shout)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
print("shouted", flush=True)
with contextlib.suppress(RuntimeError):
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    for key in ("joined/10.77.0.2", "clock/10.77.0.2", "read/10.77.0.2"):
        store.set(key, str(__import__("time").time()))
    store.set("torch.rendezvous.podium", base64.b64encode(pickle.dumps(Payload())))
    print("set", flush=True)
"""


def is_listening(name: str) -> bool:
    """Whether the first host waits for the others."""
    return f"{HOSTS[0]}:29400" in subprocess.run(inside(name, "ss", "-Hltn"), capture_output=True, text=True).stdout


def test_a_machine_that_poses_as_the_missing_host_runs_nothing_and_the_run_completes(hosts, tmp_path, weights_alone):
    names, ends = hosts
    ip("-n", names[1], "addr", "add", f"{STRANGER}/24", "dev", ends[1])
    marker = tmp_path / "code was run"
    args = ["train", *recipe_of("mnist"), *SPREAD, "--join", "--out", "run"]
    first = on_host(names[0], tmp_path, *args)
    first.until(lambda: is_listening(names[0]), "the port")
    attack = inside(names[1], sys.executable, "-c", ATTACK, HOSTS[0], 29400, marker, STRANGER)
    done = subprocess.run(attack, capture_output=True, text=True, timeout=120)
    assert done.stdout == "shouted\n", done
    first.until(lambda: f"refused a connection from {STRANGER}, which does not know the secret" in first.stderr, "told")
    results = [ended(process) for process in (first, on_host(names[1], tmp_path, *args))]
    assert [code for code, _ in results] == [0, 0], results
    assert not marker.exists()
    assert results[0][1].count(f"refused a connection from {STRANGER}") == 1
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(recipe_of("mnist"))


def processes_of(launched: Started) -> list[psutil.Process]:
    launcher = psutil.Process(launched.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def open_ports(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Everything that takes connections or messages from a network, by any of them."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    found.add((one.laddr.ip, one.laddr.port))
    return found


def as_nobody(try_it) -> str:
    """What `try_it()` returns or raises, as another user of this machine."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writable, str(try_it()).encode())
        except BaseException as error:
            os.write(writable, type(error).__name__.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def test_another_user_of_the_machine_finds_nothing_to_connect_to(tmp_path, weights_alone):
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    with started("train", *recipe_of("mnist"), "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 2)
        assert open_ports(processes_of(launched)) == set()
        unix = psutil.Process(launched.process.pid).net_connections("unix")
        folder = next(Path(one.laddr).parent for one in unix if str(one.laddr).endswith("/meeting"))

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(folder / "meeting"))
            return "connected"

        assert as_nobody(lambda: os.getuid()) == str(NOBODY)
        assert as_nobody(connect) == "PermissionError"
        assert as_nobody(lambda: os.listdir(folder)) == "PermissionError"  # noqa: PTH208
        done = launched.ended()
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(recipe_of("mnist"))


@pytest.mark.parametrize("mode", ["engine.reduction=fast", "parallel.stages=2"])
def test_ports_of_gloo_answer_nobody_once_the_instances_are_connected(tmp_path, mode):
    with started("train", *recipe_of("mnist"), mode, "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 2)
        ports = open_ports(processes_of(launched))
        assert ports
        for address in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.3)
        done = launched.ended()
    assert done.returncode == 0, done.stderr


def test_a_run_on_one_host_opens_no_port_from_start_to_end(tmp_path):
    seen: set[tuple[str, int]] = set()
    with started("train", *recipe_of("mnist"), "--instances", 2, "--out", "run", cwd=tmp_path) as launched:
        looks = 0
        while launched.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                seen |= open_ports(processes_of(launched))
                looks += 1
        assert launched.ended().returncode == 0, launched.stderr
    assert looks > 10
    assert seen == set()


def test_where_gloo_is_needed_on_one_host_it_listens_on_loopback_alone(tmp_path):
    args = ["train", *recipe_of("mnist"), "engine.reduction=fast", "--instances", 2, "--out", "run"]
    with started(*args, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 2)
        addresses = {address for address, _ in open_ports(processes_of(launched))}
    assert addresses == {"127.0.0.1"}


def all_arguments() -> str:
    """The command lines of everything that runs here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)


def test_a_secret_from_a_file_is_in_no_command_line_log_or_file_of_the_run(hosts, tmp_path):
    names, _ = hosts
    secret = "f00dfeed" * 8
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secret)
    run = Run(tmp_path / "run")
    processes = both(names, tmp_path, "train", *recipe_of("mnist"), "--secret-file", file, "--out", "run")
    until(lambda: num_records(run) >= 2 or processes[0].process.poll() is not None, "records")
    assert secret not in all_arguments()
    results = [ended(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != file:
            assert secret.encode() not in path.read_bytes(), path


def test_hosts_with_different_secrets_do_not_meet(hosts, tmp_path):
    names, _ = hosts
    args = ["train", *recipe_of("mnist"), *SPREAD, "--join", "--out", "run"]
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch(mode=0o600)
        file.write_text(f"the secret of {file.name}")
    first = on_host(names[0], tmp_path, *args, "--secret-file", files[0])
    first.until(lambda: is_listening(names[0]), "the port")
    code, errors = ended(on_host(names[1], tmp_path, *args, "--secret-file", files[1]))
    assert code == 2, errors
    assert f"{HOSTS[0]}:29400, where the instances meet, has another secret than this host" in sentence(errors)
    first.until(lambda: f"refused a connection from {HOSTS[1]}" in first.stderr, "told")
    done = first.ended(signal.SIGTERM)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("refused") == 1
    assert not (tmp_path / "run").exists()
