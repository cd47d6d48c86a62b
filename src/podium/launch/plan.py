"""What to start where. Pure: from counts and host names to commands; `agent.py` carries it out."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from podium.errors import UserError
from podium.launch.environment import END_WITH_INPUT
from podium.topology import Topology

#: ssh asks no questions and does not wait for a host that is off; the user's own options come first and win
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")


@dataclass(frozen=True)
class Limits:
    """How many instances may train, where they come and go."""

    fewest: int = 1
    most: int = 1 << 20
    #: whether the recipe's replicas can be dealt to so many
    fits: Callable[[int], bool] = bool
    #: how many may leave at once: where each has a share of the state, as many as hold a copy of it
    at_once: int = 1 << 20

    def can_train(self, count: int) -> bool:
        return count >= self.fewest and self.fits(count)

    @property
    def leave_in_turn(self) -> bool:
        """Whether some have to wait until others have left."""
        return self.at_once < self.most

    def too_many_leave(self) -> str:
        copies = "spare copy" if self.at_once == 1 else "spare copies"
        return (
            f"{self.at_once} at most can leave at once, as each share of the optimiser's state has {self.at_once} "
            f"{copies} (launch.spare_copies)"
        )

    def too_few(self, count: int) -> str:
        """Return what is wrong with so many."""
        least = f"at least {self.fewest} were asked for" if count < self.fewest else "so many cannot carry its replicas"
        return f"only {count} {'instance is' if count == 1 else 'instances are'} left, and {least}"


@dataclass(frozen=True)
class LaunchPlan:
    """One host's part: start a process of `command` for each of `instances`, and meet the other hosts at `meeting`."""

    topology: Topology
    host_index: int
    #: (address, port) that instances meet at; port 0: a free one, on this host alone
    meeting: tuple[str, int]
    command: tuple[str, ...]
    #: whether whoever started this host starts it again after exit code 75
    started_again: bool = False
    limits: Limits = field(default_factory=Limits)
    #: keys of the recipe that this launch has changed
    overrides: tuple[str, ...] = ()
    #: whether this host comes to a run that others have begun
    is_visitor: bool = False
    #: whether other hosts may come, though the run begins on one
    is_open: bool = False

    @property
    def host(self) -> str:
        return self.topology.hosts[self.host_index]

    @property
    def instances(self) -> range:
        """The instances of this host."""
        return self.topology.instances_on(self.host_index)

    @property
    def alone(self) -> bool:
        return len(self.topology.hosts) == 1 and not self.is_open and not self.is_visitor

    @property
    def keeps_store(self) -> bool:
        return self.host_index == 0 and not self.is_visitor


def plan_launch(
    topology: Topology,
    local_names: frozenset[str],
    port: int,
    command: tuple[str, ...],
    host_index: int | None = None,
    *,
    started_again: bool = False,
) -> LaunchPlan:
    """Return this host's part of a launch; `local_names` are the names and addresses of this host, unless it has been
    told its `host_index`."""
    if topology.hosts == ("this host",):
        return LaunchPlan(topology, 0, ("127.0.0.1", 0), command)
    if host_index is not None:
        if host_index >= len(topology.hosts):
            raise UserError(f"this is host {host_index}, counted from 0, but --hosts names {len(topology.hosts)}")
        return LaunchPlan(topology, host_index, (topology.hosts[0], port), command, started_again)
    here = [index for index, host in enumerate(topology.hosts) if host in local_names]
    if len(here) != 1:
        known = ", ".join(sorted(name for name in local_names if not name.startswith("127.") and ":" not in name))
        problem = "is not one of" if not here else "is more than one of"
        raise UserError(f"this host (known as {known}) {problem} --hosts {','.join(topology.hosts)}")
    return LaunchPlan(topology, here[0], (topology.hosts[0], port), command, started_again)


def ssh_commands(plan: LaunchPlan, ssh: str, folder: str, arguments: tuple[str, ...]) -> dict[str, list[str]]:
    """Return, by host, the commands that make the others join, in the same folder with the same Podium."""
    if not plan.keeps_store:
        first = plan.topology.hosts[0]
        raise UserError(f"{first} starts the other hosts: run this there, or on every host with --join")
    joined = shlex.join(["env", f"{END_WITH_INPUT}=yes", *arguments, "--join"])
    return {
        host: [*shlex.split(ssh), *_SSH_OPTIONS, host, f"cd {shlex.quote(folder)} && exec {joined}"]
        for host in plan.topology.hosts[1:]
    }
