"""The devices of this host: which one a process computes on, how many there are, and what they say of themselves.

A device always has its index here, and is made the process's current one (`use_device`) before anything else asks for
an accelerator: otherwise every process of a host would open the first one.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import UserError
from podium.machine.determinism import settings

#: variables that choose and order the devices a process sees, by kind
_VISIBLE = {
    "cuda": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def resolve_device(name: str, local_index: int = 0, instances_per_device: int = 1) -> torch.device:
    """Return the device of the instance that is number `local_index` on its host, by the recipe's `engine.device`.

    `auto` is the machine's accelerator where there is one, else the CPU. Neighbouring instances, which carry
    neighbouring replicas, share a device where `instances_per_device` says so. A launcher may show every process
    devices of its own: numbers beyond those begin again, and `launch/join.py` compares what was taken.
    """
    # Only one that is there now: a torch built for an accelerator names it on machines without one, too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        device = accelerator or torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UserError(f"engine.device = {name}: expected auto, cpu or an accelerator such as cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        there = "none" if accelerator is None else accelerator.type
        raise UserError(
            f"engine.device = {name}: torch finds no such accelerator on this machine (it finds: {there}); "
            "engine.device=auto takes what there is"
        )
    count = torch.accelerator.device_count()
    if device.index is None or name == "auto":
        return torch.device(device.type, local_index // instances_per_device % count)
    if device.index >= count:
        raise UserError(f"engine.device = {name}: this machine has {count} of {device.type}, counted from 0")
    return device


def use_device(device: torch.device) -> torch.device:
    """Make the device this process's current one, and return it."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that draws on the device come from: the CPU's, and the device's own."""
    states = [torch.get_rng_state()]
    if device.type == "mps":  # has one device, which is not given
        states.append(torch.mps.get_rng_state())
    elif device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the states that `random_states` has returned."""
    torch.set_rng_state(states[0])
    if device.type == "mps":
        torch.mps.set_rng_state(states[1])
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters and buffers to the device; what several modules share stays shared.

    On some devices (those of other makers, which torch loads as extensions), torch makes new parameters instead of
    moving their data, a new one for each module that has it.
    """
    owners = {id(owner): owner for owner in module.modules()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in owners.values():
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(param), []).append((owner, name))
    module.to(device)
    for (first, name), *others in places.values():
        for other, other_name in others:
            other.register_parameter(other_name, getattr(first, name))


def num_devices(name: str) -> int:
    """Return how many devices of this host the recipe's `engine.device` stands for; 0: it computes on the processor."""
    device = resolve_device(name)
    if device.type == "cpu":
        return 0
    return torch.accelerator.device_count() if name in ("auto", device.type) else 1


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in double precision; MPS and some XPUs do not."""
    if device.type == "xpu":
        return bool(getattr(_properties(device), "has_fp64", True))
    return device.type != "mps"


def device_name(device: torch.device) -> str:
    """Return what the maker calls the device; of the CPU, its kind."""
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return f"{device.type} {name}".strip()


def device_identity(device: torch.device, env: Mapping[str, str] = os.environ) -> str:
    """Return what no two devices of a host have alike, whatever number they have in a process.

    It is the device's own (that of a slice of one, with MIG); where there is none, the place among those that the
    environment makes visible.
    """
    if device.type == "cpu":
        return ""
    if (uuid := getattr(_properties(device), "uuid", None)) is not None:
        return str(uuid)
    visible = next((env[name] for name in _VISIBLE.get(device.type, ()) if env.get(name)), "").split(",")
    return visible[device.index].strip() if device.index < len(visible) and visible != [""] else str(device.index)


def _properties(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None


def accelerator_facts(device: torch.device) -> dict[str, str]:
    """Return what the bits of an accelerator depend on beside torch, as far as it says; nothing for a processor."""
    if device.type == "cpu":
        return {}
    facts = {"name": device_name(device), **settings(device)}
    properties = _properties(device)
    for name in ("gcnArchName", "driver_version"):
        if value := getattr(properties, name, None):
            facts[name] = str(value)
    if device.type == "cuda":
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["cuda"] = str(torch.version.cuda or torch.version.hip)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["driver"] = _nvidia_driver()
    return facts


def _nvidia_driver() -> str:
    """Return the version of the driver, as the kernel tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return "unknown"
