"""Who carries what: hosts × instances × replicas × stages, and where in it this process stands.

Pure but for reading the environment, and the only reader of launch variables (torch's launcher, Slurm, Podium's own).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from podium.cores import numa_nodes, own_cores
from podium.errors import UserError
from podium.table import Table

#: Variables that Podium's own launcher hands to the instances it starts.
LAUNCH_FOLDER, HOST_NAME, HOST_CORES = "PODIUM_LAUNCH_FOLDER", "PODIUM_HOST_NAME", "PODIUM_HOST_CORES"
#: What a host that starts others by ssh tells them: end when your standard input does.
END_WITH_INPUT = "PODIUM_END_WITH_INPUT"


@dataclass(frozen=True)
class Topology:
    """Hosts hold instances, instances carry aligned blocks of replicas; both in order, all alike.

    With stages an instance carries one stage of its block, and neighbouring instances hold the stages of one block.
    """

    num_replicas: int
    num_instances: int = 1
    hosts: tuple[str, ...] = ("this host",)
    num_stages: int = 1
    #: layers on each stage, where the recipe says so
    stage_layers: tuple[int, ...] = ()
    #: cores that the instances of this host share; None: what this process may use
    host_cores: int | None = None

    @property
    def instances_per_host(self) -> int:
        return self.num_instances // len(self.hosts)

    def local_replicas(self, instance: int) -> range:
        """The aligned block of replicas that an instance carries, or carries one stage of."""
        share = self.num_replicas * self.num_stages // self.num_instances
        block = instance // self.num_stages
        return range(block * share, (block + 1) * share)

    def stage_of(self, instance: int) -> int:
        """The stage that an instance carries; 0 where a replica is whole."""
        return instance % self.num_stages

    def host_of(self, instance: int) -> str:
        return self.hosts[instance // self.instances_per_host]

    def record(self) -> dict[str, int]:
        """As it stands in `summary.json`."""
        return {
            "hosts": len(self.hosts),
            "instances": self.num_instances,
            "replicas": self.num_replicas,
            "stages": self.num_stages,
        }

    def table(self) -> Table:
        """The drawing: one row per instance with its host, its replicas, its stage."""
        rows: list[list[str]] = []
        for instance in _shortened(self.num_instances):
            if instance is None:
                rows.append(["…"] * len(rows[0]))
                continue
            named = instance % self.instances_per_host == 0 or rows[-1][0] == "…"
            replicas = self.local_replicas(instance)
            shown = str(replicas.start) if len(replicas) == 1 else f"{replicas.start} … {replicas.stop - 1}"
            row = [self.host_of(instance) if named else "", f"instance {instance}", f"replica {shown}"]
            stage = self.stage_of(instance)
            row += [f"stage {stage}"] if self.num_stages > 1 else []
            row += [str(self.stage_layers[stage])] if self.stage_layers else []
            rows.append(row)
        columns = ["host", "instance", "replicas"]
        columns += (["stage"] if self.num_stages > 1 else []) + (["layers"] if self.stage_layers else [])
        counts = [("host", len(self.hosts)), ("instance", self.num_instances), ("replica", self.num_replicas)]
        counts += [("stage", self.num_stages)] if self.num_stages > 1 else []
        return Table("Topology", columns, rows, " · ".join(_counted(*count) for count in counts))


def _counted(name: str, count: int) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _shortened(num_rows: int, most: int = 24) -> list[int | None]:
    """The rows that are shown; None stands for those left out in the middle."""
    if num_rows <= most:
        return list(range(num_rows))
    return [*range(most // 2), None, *range(num_rows - most // 2, num_rows)]


def build_topology(
    num_replicas: int,
    num_instances: int = 1,
    hosts: tuple[str, ...] = ("this host",),
    num_stages: int = 1,
    stage_layers: tuple[int, ...] = (),
) -> Topology:
    """Checks that the counts can be exact; the sentence says which ones would be."""
    if len(set(hosts)) < len(hosts):
        raise UserError(f"a host is named twice in {','.join(hosts)}")
    works = possible_instances(num_replicas, num_stages, len(hosts))
    if num_instances not in works:
        whole = num_stages == 1
        times = "" if whole else f"{num_stages} stages × "
        reason = (
            f"an instance carries {'at least one whole replica' if whole else 'one stage of at least one replica'}"
            if num_instances > num_replicas * num_stages
            else f"instances must be {times}a power of two that divides the replicas"
            if num_instances not in possible_instances(num_replicas, num_stages)
            else f"{len(hosts)} hosts must carry equally many"
        )
        can = f"can be: {', '.join(map(str, works))}" if works else "no number of instances would do"
        carried = _counted("replica", num_replicas) + ("" if whole else f" of {num_stages} stages")
        raise UserError(
            f"{_counted('instance', num_instances)} on {_counted('host', len(hosts))} cannot carry "
            f"{carried} exactly: {reason} ({can})"
        )
    return Topology(num_replicas, num_instances, hosts, num_stages, stage_layers)


def possible_instances(num_replicas: int, num_stages: int = 1, num_hosts: int = 1) -> list[int]:
    """The stages times the powers of two that divide the replicas: their blocks are whole subtrees of the reduction.

    Of these, the counts that hosts can share equally.
    """
    blocks = [1]
    while num_replicas % (blocks[-1] * 2) == 0:
        blocks.append(blocks[-1] * 2)
    return [num_stages * count for count in blocks if num_stages * count % num_hosts == 0]


def auto_instances(num_replicas: int, num_cores: int, threads: int, num_stages: int = 1, num_hosts: int = 1) -> int:
    """As many instances as the cores of all hosts can keep busy with `threads` threads each, or as few as can be."""
    works = possible_instances(num_replicas, num_stages, num_hosts) or [num_stages]
    return max((count for count in works if count * threads <= num_cores), default=works[0])


# --- where this process stands -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """This process among the instances of a run, as its launcher says."""

    index: int
    count: int
    local_index: int
    local_count: int
    #: where the store is that instances meet at, and whether the launcher keeps it (else instance 0 does)
    address: str
    port: int
    store_kept: bool
    #: 0 at first, then how often the launcher has started the instances anew
    attempt: int = 0
    host: str = ""
    #: cores of the host that all its instances share; None: whatever this process may use
    host_cores: tuple[int, ...] | None = None
    #: where Podium's launcher wants to find what went wrong; None under other launchers
    launch_folder: str | None = None


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place that torch's launcher, Podium's or Slurm gave to this process; None when a person started it."""
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return _place_of_torch(env)
        # A batch script has the job's variables, too, but is no task of a step: it is as if a person had started it.
        if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
            return _place_of_slurm(env)
    except (KeyError, ValueError) as error:
        raise UserError(f"the launcher's environment is incomplete or not understood: {error}") from None
    return None


def _place_of_torch(env: Mapping[str, str]) -> Place:
    cores = env.get(HOST_CORES)
    return Place(
        index=int(env["RANK"]),
        count=int(env["WORLD_SIZE"]),
        local_index=int(env["LOCAL_RANK"]),
        local_count=int(env["LOCAL_WORLD_SIZE"]),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        store_kept=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        host=env.get(HOST_NAME, ""),
        host_cores=tuple(map(int, cores.split(","))) if cores else None,
        launch_folder=env.get(LAUNCH_FOLDER),
    )


def _place_of_slurm(env: Mapping[str, str]) -> Place:
    index, count = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
    hosts = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1)
    # A port of its own for every job and step, so that two on one host do not meet.
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    return Place(
        index=index,
        count=count,
        local_index=int(env["SLURM_LOCALID"]),
        local_count=count // hosts,
        address="127.0.0.1"
        if hosts == 1
        else first_slurm_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"]),
        port=20000 + (job * 31 + step) % 12000,
        store_kept=False,
        attempt=int(env.get("SLURM_RESTART_COUNT", "0")),
        host=env.get("SLURMD_NODENAME", ""),
    )


def first_slurm_host(hosts: str) -> str:
    """The first of Slurm's compressed host list: `gpu[003-007,9],login` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", hosts)
    if match is None:
        raise ValueError(f"no host in {hosts!r}")
    stem, numbers, rest = match.groups()
    return stem + (re.split(r"[-,]", numbers)[0] if numbers else "") + rest


# --- what an instance may use ---------------------------------------------------------------------------------------


def usable_cores() -> tuple[int, ...]:
    """The cores of this process. Those of one NUMA node stand together, so that neighbouring cores share memory; what
    an instance bound to them touches first is then kept near them by the system."""
    return by_numa_node(own_cores(), numa_nodes())


def by_numa_node(cores: set[int], node_of: Mapping[int, int]) -> tuple[int, ...]:
    """`cores`, node after node; those of no known node are last."""
    return tuple(sorted(cores, key=lambda core: (node_of.get(core, len(node_of)), core)))


def resolve_threads(threads: int | str, num_cores: int, num_replicas: int) -> int:
    """Threads per replica: `auto` depends on the machine and the recipe, never on the number of instances."""
    return threads if isinstance(threads, int) else max(1, num_cores // num_replicas)


def share_of_cores(cores: tuple[int, ...], local_index: int, local_count: int) -> tuple[int, ...]:
    """The cores of one instance: neighbouring ones, an equal share each; all of them where there are too few."""
    share = len(cores) // local_count
    return cores[local_index * share : (local_index + 1) * share] if share else cores


def resolve_device(name: str) -> torch.device:
    """`auto` is the machine's accelerator where there is one, else the CPU."""
    # Only one that is there now: a torch built for an accelerator names it on machines without one, too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"engine.device = {name}: expected auto, cpu or an accelerator such as cuda:0") from None
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        there = "none" if accelerator is None else accelerator.type
        raise UserError(
            f"engine.device = {name}: torch finds no such accelerator on this machine (it finds: {there}); "
            "engine.device=auto takes what there is"
        )
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise UserError(
            f"engine.device = {name}: this machine has {torch.accelerator.device_count()} of {device.type}, "
            "counted from 0"
        )
    return device


def ends_with_input(env: Mapping[str, str]) -> bool:
    """Whether this launcher was started by another host's, through ssh, and must not outlive it."""
    return END_WITH_INPUT in env


def launch_environment(folder: str, host: str, cores: tuple[int, ...]) -> dict[str, Any]:
    """What Podium's launcher tells the instances it starts beyond what torch's agent does."""
    return {LAUNCH_FOLDER: folder, HOST_NAME: host, HOST_CORES: ",".join(map(str, cores))}
