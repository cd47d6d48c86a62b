"""The topology: hosts × instances × replicas × stages, and the cores and threads that each instance may use."""

from collections.abc import Mapping
from dataclasses import dataclass

from podium.errors import UserError
from podium.machine.cores import numa_nodes, own_cores
from podium.ui.table import Table


@dataclass(frozen=True)
class Topology:
    """Hosts run instances, instances carry aligned blocks of replicas; all in order, the same number on each.

    With stages, an instance carries one stage of its block, and neighbouring instances hold the stages of one block.
    """

    num_replicas: int
    num_instances: int = 1
    hosts: tuple[str, ...] = ("this host",)
    num_stages: int = 1
    #: layers on each stage, if the recipe gives them
    stage_layers: tuple[int, ...] = ()
    #: cores that the instances of this host share; None: those that this process may use
    host_cores: int | None = None

    @property
    def instances_per_host(self) -> int:
        return self.num_instances // len(self.hosts)

    def local_replicas(self, instance: int) -> range:
        """Return the aligned block of replicas that an instance carries, either whole or one stage of them."""
        share = self.num_replicas * self.num_stages // self.num_instances
        block = instance // self.num_stages
        return range(block * share, (block + 1) * share)

    def stage_of(self, instance: int) -> int:
        """Return the stage that an instance carries; 0 if replicas are not divided into stages."""
        return instance % self.num_stages

    def host_of(self, instance: int) -> str:
        return self.hosts[instance // self.instances_per_host]

    def record(self) -> dict[str, int]:
        """Return the counts that `summary.json` holds."""
        return {
            "hosts": len(self.hosts),
            "instances": self.num_instances,
            "replicas": self.num_replicas,
            "stages": self.num_stages,
        }

    def table(self) -> Table:
        """Return a table with one row per instance: its host, its replicas, its stage."""
        rows: list[list[str]] = []
        for instance in _shortened(self.num_instances):
            if instance is None:
                rows.append(["…"] * len(rows[0]))
                continue
            named = instance % self.instances_per_host == 0 or rows[-1][0] == "…"
            replicas = self.local_replicas(instance)
            shown = str(replicas.start) if len(replicas) == 1 else f"{replicas.start} to {replicas.stop - 1}"
            row = [
                self.host_of(instance) if named else "",
                f"instance {instance}",
                f"{'replica' if len(replicas) == 1 else 'replicas'} {shown}",
            ]
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
    """Return the rows to show; None stands for those omitted in the middle."""
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
    """Return the topology of these counts; raise UserError, with the possible ones, if results could not be exact."""
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
            else f"each of {len(hosts)} hosts must carry the same number"
        )
        can = f"possible: {', '.join(map(str, works))}" if works else "no number of instances is possible"
        carried = _counted("replica", num_replicas) + ("" if whole else f" of {num_stages} stages")
        raise UserError(
            f"{_counted('instance', num_instances)} on {_counted('host', len(hosts))} cannot carry "
            f"{carried} exactly: {reason} ({can})"
        )
    return Topology(num_replicas, num_instances, hosts, num_stages, stage_layers)


def possible_instances(num_replicas: int, num_stages: int = 1, num_hosts: int = 1) -> list[int]:
    """Return the possible numbers of instances: stages times a power of two that divides the replicas.

    The blocks of replicas are then complete subtrees of the reduction. Hosts must share the instances equally.
    """
    blocks = [1]
    while num_replicas % (blocks[-1] * 2) == 0:
        blocks.append(blocks[-1] * 2)
    return [num_stages * count for count in blocks if num_stages * count % num_hosts == 0]


def auto_instances(num_replicas: int, num_cores: int, threads: int, num_stages: int = 1, num_hosts: int = 1) -> int:
    """Return as many instances as all hosts have cores for, with `threads` threads each; at least the minimum."""
    works = possible_instances(num_replicas, num_stages, num_hosts) or [num_stages]
    return max((count for count in works if count * threads <= num_cores), default=works[0])


# --- cores and threads of an instance -------------------------------------------------------------------------------


def usable_cores() -> tuple[int, ...]:
    """Return the cores of this process grouped by NUMA node, so that neighbouring cores share memory.

    The operating system then places memory near the cores of the instance that touches it first.
    """
    return by_numa_node(own_cores(), numa_nodes())


def by_numa_node(cores: set[int], node_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return `cores` ordered by NUMA node; those whose node is unknown come last."""
    return tuple(sorted(cores, key=lambda core: (node_of.get(core, len(node_of)), core)))


def resolve_threads(threads: int | str, num_cores: int, num_replicas: int) -> int:
    """Return the threads per replica: `auto` depends on the machine and the recipe, not on the number of instances."""
    return threads if isinstance(threads, int) else max(1, num_cores // num_replicas)


def share_of_cores(cores: tuple[int, ...], local_index: int, local_count: int) -> tuple[int, ...]:
    """Return the cores of one instance: an equal share of neighbouring cores, or all of them if there are too few."""
    share = len(cores) // local_count
    return cores[local_index * share : (local_index + 1) * share] if share else cores
