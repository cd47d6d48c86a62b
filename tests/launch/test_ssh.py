"""One command on one host starts the other by a real ssh, and takes it along when it ends."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, SPREAD, ended, inside, ip, on_host
from tests.support.processes import Started, num_records, sentence, until
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

PORT = 2222
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
#: long enough for a signal to come in time
RECIPE = [*recipe_of("mnist"), "batch.replicas=2", "train.length=300up"]


@dataclass
class Door:
    """The ssh server of the second host, and how the first one reaches it."""

    names: list[str]
    folder: Path
    server: int

    def ssh(self, key: str = "key") -> str:
        options = [f"UserKnownHostsFile={self.folder}/known", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"]
        return " ".join([f"ssh -F none -p {PORT} -i {self.folder}/{key}", *(f"-o {option}" for option in options)])

    def train(self, cwd: Path, *args: object) -> Started:
        """`podium train` on the first host alone."""
        ssh = () if any(str(arg).startswith("launch.ssh=") for arg in args) else (f"launch.ssh={self.ssh()}",)
        return on_host(self.names[0], cwd, "train", *RECIPE, *ssh, *args, *SPREAD, "--out", "run")

    def left_behind(self) -> list[str]:
        """What runs on the second host beside the ssh server."""
        found = []
        for pid in map(int, ip("netns", "pids", self.names[1]).stdout.split()):
            if pid != self.server:
                try:
                    found.append(" ".join(psutil.Process(pid).cmdline()))
                except psutil.Error:
                    continue
        return found

    def until_empty(self) -> None:
        until(lambda: not self.left_behind(), "the end of everything on the second host", deadline_s=40)


@pytest.fixture
def door(hosts, tmp_path_factory) -> Iterator[Door]:
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server or client (openssh-server, openssh-client) is not installed")
    names, _ = hosts
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "key", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "known").write_text(f"[{HOSTS[1]}]:{PORT} {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"ListenAddress {HOSTS[1]}\nPort {PORT}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on this empty folder
    log = (folder / "log").open("wb")
    with log, subprocess.Popen(inside(names[1], SSHD, "-D", "-e", "-f", folder / "config"), stderr=log) as server:
        try:
            until(lambda: server.poll() is not None or (folder / "pid").exists(), "the ssh server", deadline_s=20)
            assert server.poll() is None, (folder / "log").read_text()
            yield Door(names, folder, server.pid)
        finally:
            server.terminate()


def test_one_command_trains_on_both_hosts_is_interrupted_and_resumed_to_the_same_weights(door, tmp_path, weights_alone):
    run = Run(tmp_path / "run")
    first = door.train(tmp_path)
    until(lambda: num_records(run) >= 3 or first.process.poll() is not None, "records")
    assert len(door.left_behind()) > 0
    first.process.send_signal(signal.SIGTERM)
    code, errors = ended(first)
    assert code == 75, errors
    assert "stopped by SIGTERM" in sentence(errors)
    assert run.summary()["state"] == "interrupted"
    door.until_empty()

    saved = num_records(run)
    second = on_host(door.names[0], tmp_path, "resume", "run", *SPREAD)
    until(lambda: num_records(run) > saved or second.process.poll() is not None, "more records")
    (connection,) = [child for child in psutil.Process(second.process.pid).children() if child.name() == "ssh"]
    connection.kill()  # the hosts still hear each other, so this changes nothing
    code, errors = ended(second)
    assert code == 0, errors
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert run.summary()["topology"]["hosts"] == 2
    door.until_empty()


def test_a_host_that_ssh_cannot_start_is_one_sentence_at_once(door, tmp_path):
    stranger = f"launch.ssh={door.ssh(key='stranger')}"
    code, errors = ended(door.train(tmp_path, stranger), timeout=60)  # launch.timeout is 300
    assert code == 2, errors
    assert f"{HOSTS[1]} could not be started by ssh (exit 255): " in sentence(errors)
    assert "Permission denied" in sentence(errors)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_nothing_stays_on_the_other_host_when_the_first_is_killed(moment, door, tmp_path):
    run = Run(tmp_path / "run")
    first = door.train(tmp_path)
    happened = {"starting": lambda: any("--join" in line for line in door.left_behind()),
                "training": lambda: num_records(run) >= 3}[moment]  # fmt: skip
    until(lambda: happened() or first.process.poll() is not None, moment)
    first.process.kill()
    ended(first)
    door.until_empty()
    if moment == "training":
        until(lambda: run.summary()["state"] == "interrupted", "saved by the instances")
