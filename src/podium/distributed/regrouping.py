"""What a training asks of whoever started its instances, so that it can go on when one of them is lost or has come.

`launch/member.py` answers; `training/regrouping.py` asks. Instances that nobody looks after in this way have none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from podium.topology import Topology

if TYPE_CHECKING:
    from podium.distributed.instances import Instances


@dataclass(frozen=True)
class Standing:
    """What an instance has when it waits for the next group."""

    #: completed updates; below 0: it has come and has no state yet
    update: int
    #: whether it also has the losses that are not recorded yet
    whole: bool


@dataclass(frozen=True)
class Group:
    """The instances that go on together, and from where."""

    topology: Topology
    instances: "Instances"
    #: the completed update that all go on from, and the instance that hands its state to those that are behind
    update: int
    source: int
    #: whether record, validation and checkpoint of that update are to be made again
    again: bool


class Membership(Protocol):
    """This process as a member of a run whose instances come and go."""

    #: whether it has come to a run under way, and has no state
    joins: bool

    def announce(self) -> None:
        """Say that this instance trains, and could go on in another group."""
        ...

    def stay(self) -> None:
        """Say that this instance trains, and could not go on in another group."""
        ...

    def has_changed(self) -> bool:
        """Return whether the group is no longer the newest one. Takes a microsecond."""
        ...

    def has_lost(self) -> bool:
        """Return whether the run goes on without an instance of the group, or has ended. Reads a file."""
        ...

    def withdraw(self) -> None:
        """Say that it trains no more, and could not go on in another group."""
        ...

    def updated(self) -> None:
        """Note that an update is complete."""
        ...

    def recorded(self) -> None:
        """Note that record, validation and checkpoint of the last update are made, where they are due."""
        ...

    def next_group(self, standing: Standing) -> Group:
        """Leave the group and enter the next one, once there is one; raise InstanceLost where there will be none."""
        ...

    def has_state(self) -> None:
        """Note that this instance has the state which its group goes on from."""
        ...

    def cannot(self, reason: str) -> None:
        """Have all instances restart from the last checkpoint."""
        ...

    def speak(self) -> None:
        """Write on the console from now on, as the lead does."""
        ...
