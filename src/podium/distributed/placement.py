"""The place of this process in a run: which instance it is, which replicas it carries, and on which device."""

from dataclasses import dataclass

import torch

from podium.distributed.instances import Instances
from podium.topology import Topology


@dataclass(frozen=True)
class Placement:
    """This instance among the others, with its device and its threads."""

    topology: Topology
    instances: Instances
    device: torch.device
    #: threads per replica, as recorded with the run
    threads: int
    #: how many of these the micro-batches are large enough to keep busy
    busy_threads: int

    @property
    def replicas(self) -> range:
        """The replicas that this instance carries."""
        return self.topology.local_replicas(self.instances.index)

    @property
    def is_lead(self) -> bool:
        """Whether this is instance 0, which alone prints and writes files (with stages, the other instances of its
        pipeline group write checkpoints too)."""
        return self.instances.index == 0
