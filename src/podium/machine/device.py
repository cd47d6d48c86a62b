"""The device that a recipe names, on this machine."""

import torch

from podium.errors import UserError


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
