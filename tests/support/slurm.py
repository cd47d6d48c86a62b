"""A Slurm of two nodes on this machine, all of it on loopback, for as long as a test needs it."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import until

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")

CONFIGURATION = """\
ClusterName=podium
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
JobRequeue=1
SlurmdTimeout=20
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_commands() -> list[str]:
    return [name for name in COMMANDS if shutil.which(name, path=PATH) is None]


@dataclass(frozen=True)
class Slurm:
    """What a user of the cluster can do."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def started(self, *command: object, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            [*map(str, command)],
            cwd=cwd,
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self, *command: object) -> str:
        return subprocess.run(
            [*map(str, command)], env=self.env, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def running_jobs(self) -> list[int]:
        return [int(line) for line in self.said("squeue", "-h", "-t", "running", "-o", "%i").split()]

    def wait_for_nodes(self) -> None:
        """Until both have nothing to do."""
        until(lambda: self.said("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], "two idle nodes", 60)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Its four services are processes of this one, and end with the block."""
    (folder / "state").mkdir()
    for node in ("node1", "node2"):
        (folder / f"spool-{node}").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=_free_ports(3))
    )
    files = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munged.pid", "log-file": "munged.log",
             "seed-file": "munged.seed"}  # fmt: skip
    slurm = Slurm(folder)
    with ExitStack() as services:

        def serve(name: str, *args: str) -> None:
            output = services.enter_context((folder / f"{name}{len(args)}.out").open("wb"))
            process = services.enter_context(
                subprocess.Popen([name, *args], env=slurm.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
            services.callback(process.terminate)

        serve("munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items()))
        until((folder / "munge.socket").exists, "munge", 20)
        serve("slurmctld", "-D", "-c")
        for node in ("node1", "node2"):
            serve("slurmd", "-D", "-N", node)
        services.callback(_cancel_all, slurm)
        slurm.wait_for_nodes()
        yield slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """One for all tests; each leaves it with two nodes that have nothing to do."""
    if missing := missing_commands():
        pytest.skip(f"Slurm or munge is not installed (no {', '.join(missing)})")
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def _cancel_all(slurm: Slurm) -> None:
    slurm.said("scancel", "--user", getpass.getuser())
    until(lambda: not slurm.said("squeue", "-h").strip(), "the end of all jobs", 60)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
