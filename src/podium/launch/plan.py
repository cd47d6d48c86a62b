"""What to start where. Pure: from counts and host names to commands; `local.py` carries it out.

Owns the `launch` section.
"""

import shlex
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt

from podium.durations import Seconds
from podium.errors import UserError
from podium.schema import Section
from podium.topology import Topology


class LaunchSection(Section):
    """How instances are started and watched; none of it changes what is learnt."""

    #: how often a run starts anew by itself, from its last checkpoint, after an instance was lost
    restarts: NonNegativeInt = 3
    #: seconds an instance may be silent, or a host may take to join
    timeout: Seconds = 300.0
    #: where hosts meet; on one host a free port is taken
    port: Annotated[int, Field(ge=1, le=65535)] = 29400


@dataclass(frozen=True)
class LaunchPlan:
    """One host's part: start `instances_per_host` processes of `command`, meeting the other hosts at `address`."""

    topology: Topology
    host_index: int
    #: (address, port) that instances meet at; port 0: a free one, on this host alone
    meeting: tuple[str, int]
    command: tuple[str, ...]

    @property
    def host(self) -> str:
        return self.topology.hosts[self.host_index]

    @property
    def alone(self) -> bool:
        return len(self.topology.hosts) == 1

    @property
    def keeps_store(self) -> bool:
        return self.host_index == 0


def plan_launch(topology: Topology, local_names: frozenset[str], port: int, command: tuple[str, ...]) -> LaunchPlan:
    """This host's part of a launch; `local_names` are the names and addresses this host goes by."""
    if topology.hosts == ("this host",):
        return LaunchPlan(topology, 0, ("127.0.0.1", 0), command)
    here = [index for index, host in enumerate(topology.hosts) if host in local_names]
    if len(here) != 1:
        known = ", ".join(sorted(name for name in local_names if not name.startswith("127.") and ":" not in name))
        problem = "is not one of" if not here else "is more than one of"
        raise UserError(f"this host (known as {known}) {problem} --hosts {','.join(topology.hosts)}")
    return LaunchPlan(topology, here[0], (topology.hosts[0], port), command)


def ssh_commands(plan: LaunchPlan, folder: str, arguments: tuple[str, ...]) -> list[list[str]]:
    """The commands that make the other hosts join, in the same folder with the same Podium."""
    joined = shlex.join([*arguments, "--join"])
    return [
        ["ssh", "-o", "BatchMode=yes", host, f"cd {shlex.quote(folder)} && exec {joined}"]
        for index, host in enumerate(plan.topology.hosts)
        if index != plan.host_index
    ]
