"""An ssh server on the second of two hosts."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import HOSTS, SPREAD, inside, ip, on_host
from tests.support.processes import Started, until
from tests.support.recipes import recipe_of

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
