"""The topology: hosts × instances × replicas × stages, and the cores and threads that each instance may use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podium.errors import UserError
from podium.machine.cores import numa_nodes, own_cores
from podium.replica_tree import deal, span_fits, spread
from podium.ui.table import Table

#: of the possible counts, so many ranges are shown from each end
_MOST_RANGES = 8


@dataclass(frozen=True)
class Blocks:
    """What a recipe asks of the blocks of replicas that instances carry, beyond that none is empty."""

    #: replicas that share statistics (`norm.span`), and so run side by side
    span: int = 1
    #: whether all are of one size (`parallel.shard: parameters`)
    alike: bool = False

    def fit(self, num_replicas: int, num_blocks: int) -> bool:
        """Return whether this many blocks are as they must be."""
        if self.alike and num_replicas % num_blocks:
            return False
        # A span that does not divide the replicas is another mistake, which `check_span` tells.
        return self.span == 1 or num_replicas % self.span > 0 or span_fits(self.span, num_replicas, num_blocks)

    def check(self, num_replicas: int, num_blocks: int) -> None:
        """Raise UserError, with the numbers of instances that would do, where they are not."""
        if self.fit(num_replicas, num_blocks):
            return
        counts = [count for count in range(1, num_replicas + 1) if self.fit(num_replicas, count)]
        possible = f"({_shown(counts, 1)})"
        if self.alike and num_replicas % num_blocks:
            raise UserError(
                "parallel.shard=parameters needs equally many replicas on all instances, which do every micro-batch "
                f"together: {num_blocks} instances cannot carry {num_replicas} replicas {possible}"
            )
        raise UserError(
            f"norm.span = {self.span} cannot lie in {num_blocks} instances of {num_replicas} replicas: replicas that "
            f"share statistics run side by side, and an instance would carry parts of two spans {possible}"
        )


_ANY = Blocks()


@dataclass(frozen=True)
class Topology:
    """Hosts run instances, instances carry blocks of replicas, as even as can be; all in order.

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
    #: instances on each host; not given: as even as can be
    given_sizes: tuple[int, ...] = ()
    #: accelerators of this host's instances, as shown; none: they compute on its processors
    local_devices: tuple[str, ...] = ()

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """The number of instances on each host."""
        return self.given_sizes or even_sizes(self.num_instances, len(self.hosts), self.num_stages)

    def instances_on(self, host: int) -> range:
        """Return the instances of a host."""
        first = sum(self.host_sizes[:host])
        return range(first, first + self.host_sizes[host])

    def host_index_of(self, instance: int) -> int:
        return next(host for host in range(len(self.hosts)) if instance in self.instances_on(host))

    def local_replicas(self, instance: int) -> range:
        """Return the block of replicas that an instance carries, either whole or one stage of them."""
        return deal(self.num_replicas, self.num_instances // self.num_stages)[instance // self.num_stages]

    def stage_of(self, instance: int) -> int:
        """Return the stage that an instance carries; 0 if replicas are not divided into stages."""
        return instance % self.num_stages

    def local_index(self, instance: int) -> int:
        """Return the number of an instance on its host."""
        return instance - self.instances_on(self.host_index_of(instance)).start

    def host_of(self, instance: int) -> str:
        return self.hosts[self.host_index_of(instance)]

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
        starts = {self.instances_on(host).start for host in range(len(self.hosts))}
        for instance in _shortened(self.num_instances):
            if instance is None:
                rows.append(["…"] * len(rows[0]))
                continue
            named = instance in starts or rows[-1][0] == "…"
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
            row += [self.local_devices[self.local_index(instance)]] if self.local_devices else []
            rows.append(row)
        columns = ["host", "instance", "replicas"]
        columns += (["stage"] if self.num_stages > 1 else []) + (["layers"] if self.stage_layers else [])
        columns += ["device"] if self.local_devices else []
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
    host_sizes: tuple[int, ...] = (),
    blocks: Blocks = _ANY,
) -> Topology:
    """Return the topology of these counts; raise UserError, with the possible ones, if an instance would have nothing
    to carry, or `blocks` are not as they must be. `host_sizes`: the number of instances on each host, if it is not to
    be as even as can be."""
    if len(set(hosts)) < len(hosts):
        raise UserError(f"a host is named twice in {','.join(hosts)}")
    assert not host_sizes or (len(host_sizes) == len(hosts) and sum(host_sizes) == num_instances)
    works = possible_instances(num_replicas, num_stages, len(hosts))
    if num_instances not in works:
        whole = num_stages == 1
        reason = (
            f"an instance carries {'at least one whole replica' if whole else 'one stage of at least one replica'}"
            if num_instances > num_replicas * num_stages
            else f"{num_instances} is not a multiple of {num_stages} stages"
            if num_instances % num_stages
            else f"each of {len(hosts)} hosts must carry at least one"
        )
        carried = _counted("replica", num_replicas) + ("" if whole else f" of {num_stages} stages")
        raise UserError(
            f"{_counted('instance', num_instances)} on {_counted('host', len(hosts))} cannot carry "
            f"{carried}: {reason} ({_shown(works, num_stages)})"
        )
    blocks.check(num_replicas, num_instances // num_stages)
    return Topology(num_replicas, num_instances, hosts, num_stages, stage_layers, given_sizes=host_sizes)


def possible_instances(
    num_replicas: int, num_stages: int = 1, num_hosts: int = 1, blocks: Blocks = _ANY
) -> Sequence[int]:
    """Return the possible numbers of instances, in order: every instance carries at least one replica, or one stage of
    one, every host at least one instance, and `blocks` are as they must be."""
    first = -(-num_hosts // num_stages) * num_stages
    counts = range(first, num_replicas * num_stages + 1, num_stages)
    return counts if blocks == _ANY else [count for count in counts if blocks.fit(num_replicas, count // num_stages)]


def _shown(counts: Sequence[int], num_stages: int) -> str:
    if not counts:
        return "no number of instances is possible"
    ranges: list[list[int]] = []
    for count in counts:
        if ranges and count == ranges[-1][-1] + num_stages:
            ranges[-1].append(count)
        else:
            ranges.append([count])
    shown = [f"{one[0]} to {one[-1]}" if len(one) > 3 else ", ".join(map(str, one)) for one in ranges]
    if len(shown) > 2 * _MOST_RANGES:
        shown[_MOST_RANGES:-_MOST_RANGES] = ["…"]
    multiples = f", in multiples of {num_stages}" if num_stages > 1 and len(counts) > 3 else ""
    return f"possible: {', '.join(shown)}{multiples}"


def even_sizes(num_instances: int, num_hosts: int, num_stages: int = 1) -> tuple[int, ...]:
    """Return the numbers of instances on each host, as even as can be; all stages of a replica are on one host, unless
    the instances could be divided equally, or hosts would have none, without that."""
    pipelines = num_instances // num_stages
    if num_instances % num_hosts == 0 or pipelines < num_hosts:
        return spread(num_instances, num_hosts)
    return tuple(num_stages * size for size in spread(pipelines, num_hosts))


def auto_instances(
    num_replicas: int, num_cores: int, threads: int, num_stages: int = 1, num_hosts: int = 1, blocks: Blocks = _ANY
) -> int:
    """Return as many instances as all hosts have cores for, with `threads` threads each; at least the minimum."""
    works = possible_instances(num_replicas, num_stages, num_hosts, blocks) or [num_stages]
    return max((count for count in works if count * threads <= num_cores), default=works[0])


def parse_hosts(text: str, num_instances: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of `--hosts a:3,b:5` and the number of instances on each; none if no host has a number.

    Where only some have one, the others share what is left of `num_instances`, or have one each. An IPv6 address
    followed by a number has brackets.
    """
    names: list[str] = []
    given: list[int | None] = []
    for item in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<size>[1-9]\d{0,5}))?", item)
        if match is None and (item.count(":") < 2 or not set(item) <= set("0123456789abcdefABCDEF:.%")):
            raise UserError(
                f"--hosts {text}: expected host names separated by commas, each with a number of instances if they "
                "differ: a:3,b:5"
            )
        names.append(item if match is None else match["address"] or match["name"])
        given.append(int(match["size"]) if match is not None and match["size"] else None)
    if all(size is None for size in given):
        return tuple(names), ()
    known, unknown = sum(size or 0 for size in given), given.count(None)
    total = known + unknown if num_instances is None else num_instances
    if total < known + unknown or (not unknown and total != known):
        raise UserError(f"--instances {total} does not fit --hosts {text}, which names {known} instances")
    rest = iter(spread(total - known, unknown) if unknown else ())
    return tuple(names), tuple(next(rest) if size is None else size for size in given)


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
