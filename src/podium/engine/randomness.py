"""Random numbers by place, not by history: every micro-batch of every replica draws from its own seed.

Nothing about the generators is saved or restored: (seed, update, replica, micro-batch) says it all, so a resumed run
and a run on another number of instances draw the same dropout masks.
"""

import torch

from podium.data import draws


def seed_torch(device: torch.device, *place: int | str) -> None:
    """Seeds torch's default generators from a place in the run, e.g. ("micro-batch", seed, update, replica, index)."""
    seed = draws.key(*place) >> 1  # torch takes signed 64-bit seeds
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
