"""Who carries what: hosts × instances × replicas × stages. Pure; `train.py` builds one and everybody else asks it."""

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Topology:
    """One instance carries all replicas, in turn."""

    num_replicas: int
    num_hosts: int = 1
    num_instances: int = 1
    num_stages: int = 1

    def local_replicas(self, instance: int) -> range:
        """The aligned block of replicas that an instance carries."""
        share = self.num_replicas // self.num_instances
        return range(instance * share, (instance + 1) * share)

    def record(self) -> dict[str, int]:
        """As it stands in `summary.json`."""
        return {name.removeprefix("num_"): value for name, value in asdict(self).items()}


def resolve_threads(threads: int | str, num_cores: int, num_replicas: int) -> int:
    """Threads per replica: `auto` depends on the machine and the recipe, never on the number of instances."""
    return threads if isinstance(threads, int) else max(1, num_cores // num_replicas)


def resolve_device(name: str) -> torch.device:
    """`auto` is the machine's accelerator where there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator() or torch.device("cpu")
