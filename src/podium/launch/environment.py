"""What a launcher tells this process: its place among the instances, and the cores that it may use.

The only reader of launch variables (torch's launcher, Slurm, Podium's own).
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from podium.errors import UserError
from podium.launch.lifeline import LAUNCHER
from podium.launch.meeting import LOOPBACK, Meeting
from podium.launch.secret import VARIABLE as SECRET
from podium.topology import share_of_cores

#: Variables that Podium's own launcher hands to the instances it starts.
LAUNCH_FOLDER, HOST_NAME, HOST_CORES = "PODIUM_LAUNCH_FOLDER", "PODIUM_HOST_NAME", "PODIUM_HOST_CORES"
MEETING, ATTEMPT = "PODIUM_MEETING", "PODIUM_ATTEMPT"
#: set for an instance that comes to a run under way
JOINS = "PODIUM_JOINS"
COMMAND = "PODIUM_COMMAND"
#: Set for hosts that are started by ssh: they end when their standard input does.
END_WITH_INPUT = "PODIUM_END_WITH_INPUT"
#: Which of the hosts this one is: our own variable, and the one that every pod of an indexed Job of Kubernetes has,
#: which JobSet and Kubeflow's TrainJob are made of.
_HOST_INDEX = ("PODIUM_HOST_INDEX", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Place:
    """This process among the instances of a run, as its launcher says."""

    index: int
    count: int
    local_index: int
    local_count: int
    #: the host at which instances meet, and whether the launcher keeps what they meet at (else instance 0 does)
    address: str
    port: int
    launcher_has_store: bool
    #: what they meet at: a socket in `folder`, Podium's service at `port`, or the store of torch's launcher there
    meets_at: Literal["folder", "service", "torch"] = "torch"
    #: a path, or the name of a folder in the private one
    folder: str = ""
    #: what a secret from the user's own key is made for, where none is given
    purpose: str = ""
    #: how often the launcher has restarted the instances
    attempt: int = 0
    host: str = ""
    #: cores of the host that all its instances share; None: whatever this process may use
    host_cores: tuple[int, ...] | None = None
    #: where Podium's launcher reads what went wrong; None under other launchers
    launch_folder: str | None = None
    #: whether it comes to a run under way, where `index` is a number that no other instance has
    joins: bool = False


def find_place(env: Mapping[str, str]) -> Place | None:
    """Return the place that torch's launcher, Podium's or Slurm gave to this process; None when a person started it."""
    try:
        if MEETING in env:
            return _place_of_podium(env)
        if "RANK" in env and "WORLD_SIZE" in env:
            return _place_of_torch(env)
        # A batch script has the job's variables, too, but is not a task of a step: treated as started by a person.
        if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
            return _place_of_slurm(env)
    except (KeyError, ValueError) as error:
        raise UserError(f"the launcher's environment is incomplete or cannot be understood: {error}") from None
    return None


def _place_of_podium(env: Mapping[str, str]) -> Place:
    cores, meeting = env.get(HOST_CORES), Meeting.parse(env[MEETING])
    return Place(
        index=int(env["RANK"]),
        count=int(env["WORLD_SIZE"]),
        local_index=int(env["LOCAL_RANK"]),
        local_count=int(env["LOCAL_WORLD_SIZE"]),
        address=meeting.address,
        port=meeting.port,
        launcher_has_store=True,
        meets_at="service" if meeting.folder is None else "folder",
        folder="" if meeting.folder is None else str(meeting.folder),
        attempt=int(env[ATTEMPT]),
        host=env.get(HOST_NAME, ""),
        host_cores=tuple(map(int, cores.split(","))) if cores else None,
        launch_folder=env.get(LAUNCH_FOLDER),
        joins=JOINS in env,
    )


def _place_of_torch(env: Mapping[str, str]) -> Place:
    return Place(
        index=int(env["RANK"]),
        count=int(env["WORLD_SIZE"]),
        local_index=int(env["LOCAL_RANK"]),
        local_count=int(env["LOCAL_WORLD_SIZE"]),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        launcher_has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def _place_of_slurm(env: Mapping[str, str]) -> Place:
    index, count, local_index = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"])
    hosts = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1)
    sizes = slurm_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    # A port of its own for every job and step, so that two on one host do not meet.
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    attempt = int(env.get("SLURM_RESTART_COUNT", "0"))
    return Place(
        index=index,
        count=count,
        local_index=local_index,
        local_count=_size_of_host(sizes, index - local_index) or count // hosts,
        address=LOOPBACK if hosts == 1 else first_slurm_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"]),
        port=20000 + (job * 31 + step) % 12000,
        launcher_has_store=False,
        meets_at="folder" if hosts == 1 else "service",
        folder=f"launch-slurm-{job}-{step}-{attempt}" if hosts == 1 else "",
        purpose=f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {job} {step} {attempt}",
        attempt=attempt,
        host=env.get("SLURMD_NODENAME", ""),
    )


def first_slurm_host(hosts: str) -> str:
    """Return the first host of Slurm's compressed list: `gpu[003-007,9],login` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", hosts)
    if match is None:
        raise ValueError(f"no host in {hosts!r}")
    stem, numbers, rest = match.groups()
    return stem + (re.split(r"[-,]", numbers)[0] if numbers else "") + rest


def slurm_tasks_per_node(sizes: str) -> list[int]:
    """Return the numbers of Slurm's compressed list: `2(x3),1` -> 2, 2, 2, 1."""
    found: list[int] = []
    for item in filter(None, sizes.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item)
        if match is None:
            raise ValueError(f"no number of tasks: {item!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _size_of_host(sizes: list[int], first: int) -> int | None:
    """Return how many instances the host has whose first one is `first`; None if that is not one's first."""
    firsts = {start: size for size, start in zip(sizes, accumulate([0, *sizes]), strict=False)}
    return firsts.get(first)


def find_host_index(env: Mapping[str, str]) -> int | None:
    """Return which of the hosts this one is, where whoever started it has numbered them; None where names tell."""
    name = next((name for name in _HOST_INDEX if name in env), None)
    if name is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", env[name]):
        raise UserError(f"{name} is {env[name]!r}: expected the number of this host")
    return int(env[name])


def ends_with_input(env: Mapping[str, str]) -> bool:
    """Return whether this launcher was started by another host's, through ssh, and must not outlive it."""
    return END_WITH_INPUT in env


def place_environment(
    meeting: Meeting, index: int, count: int, local_index: int, local_count: int, attempt: int = 0
) -> dict[str, str]:
    """Return what tells an instance of Podium's own launcher its place, `find_place` reads."""
    place = {"RANK": index, "WORLD_SIZE": count, "LOCAL_RANK": local_index, "LOCAL_WORLD_SIZE": local_count}
    secret = {SECRET: meeting.secret.decode()} if meeting.secret else {}
    launcher = {MEETING: str(meeting), ATTEMPT: str(attempt), LAUNCHER: str(os.getpid())}
    return {name: str(value) for name, value in place.items()} | launcher | secret


def launch_environment(folder: str, host: str, cores: tuple[int, ...]) -> dict[str, str]:
    """Return what else Podium's launcher tells its instances."""
    return {
        LAUNCH_FOLDER: folder,
        HOST_NAME: host,
        HOST_CORES: ",".join(map(str, cores)),
        COMMAND: json.dumps(sys.argv),
    }


def user_command(env: Mapping[str, str]) -> list[str]:
    """Return the command that a person gave: this process's own, or that of the launcher which started it."""
    command: list[str] = json.loads(env[COMMAND]) if COMMAND in env else sys.argv
    return command


def num_host_cores(place: Place, cores: Sequence[Sequence[int]]) -> int:
    """Return how many cores the instances of this host have together, bound by the launcher or not."""
    first = place.index - place.local_index
    return len(set().union(*map(set, cores[first : first + place.local_count])))


def own_cores(place: Place, cores: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the cores that an instance takes: an equal share of what it has in common with the others of its host,
    or all that it may use where the launcher has bound the instances to cores already."""
    first = place.index - place.local_index
    mine = tuple(cores[place.index])
    if any(set(other) != set(mine) for other in cores[first : first + place.local_count]):
        return mine
    return share_of_cores(mine, place.local_index, place.local_count)
