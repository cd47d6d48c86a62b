"""Random numbers by place, not by history: every block of the model, in every micro-batch of every replica, draws from
its own seed.

Nothing about the generators is saved or restored: (seed, update, replica, micro-batch, block) says it all, so a resumed
run, a run on another number of instances, and one whose model is cut into stages draw the same dropout masks.
"""

import threading
from collections.abc import Sequence

import torch
from torch import nn

from podium.data import draws

#: by thread, as replicas may run side by side: the seed of the place that a thread is at
_here = threading.local()


def seed_torch(device: torch.device, *place: int | str) -> None:
    """Seeds torch's default generators from a place in the run, e.g. ("micro-batch", seed, update, replica, index)."""
    _here.key = draws.key(*place)
    _seed(device, _here.key)


def seed_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """From now on every block but the first, in training, draws from a seed of its own at the place it runs at."""
    for number, block in enumerate(blocks):
        if number:
            _BlockSeed(block, number, device)


class _BlockSeed:
    """Seeds before a block runs. The first run tells whether it draws anything; where not, it is left alone again."""

    def __init__(self, block: nn.Module, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._before = block.register_forward_pre_hook(self._seed)
        # On an accelerator the host would wait for the answer, and seeding costs it nothing.
        self._after = block.register_forward_hook(self._look) if device.type == "cpu" else None
        self._state = torch.empty(0)

    def _seed(self, block: nn.Module, args: object) -> None:
        if block.training and (here := getattr(_here, "key", None)) is not None:
            _seed(self._device, draws.key("block", here, self._number))
            if self._after is not None:
                self._state = torch.get_rng_state()

    def _look(self, block: nn.Module, args: object, output: object) -> None:
        if self._after is not None and block.training and len(self._state):
            if torch.equal(self._state, torch.get_rng_state()):
                self._before.remove()
            self._after.remove()
            self._after = None


def _seed(device: torch.device, key: int) -> None:
    seed = key >> 1  # torch takes signed 64-bit seeds
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
