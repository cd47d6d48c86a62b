"""Who carries what: hosts × instances × replicas × stages. Pure; `train.py` builds one and everybody else asks it."""

from dataclasses import asdict, dataclass

import torch

from podium.errors import UserError


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
