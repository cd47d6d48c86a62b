"""Random numbers by place, not by history: every block of the model, in every micro-batch of every replica, draws from
its own seed.

No generator state is saved or restored: (seed, update, replica, micro-batch, block) determines every draw, so a resumed
run, a run on another number of instances, and one whose model is cut into stages draw the same dropout masks.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from podium.machine import counter_rng
from podium.machine.recording import note


class MicroBatch(NamedTuple):
    """A micro-batch's place in the run, all counted from 0."""

    update: int
    replica: int
    number: int


#: per thread, since replicas may run side by side: the seed of the thread's current place, and the micro-batch
_here = threading.local()
#: what any thread entered last, for the threads of accelerators' backward passes, which enter nothing themselves
_latest: list[MicroBatch] = []


def enter_micro_batch(device: torch.device, seed: int, micro_batch: MicroBatch) -> None:
    """Seed this thread's draws, from now on, by the place in the run."""
    _seed_place(device, "micro-batch", seed, *micro_batch)
    _here.micro_batch = micro_batch
    _latest[:] = [micro_batch]


def entered() -> MicroBatch | None:
    """Return the micro-batch that this thread is processing; None before the first."""
    found: MicroBatch | None = getattr(_here, "micro_batch", None)
    return found or (_latest[0] if _latest else None)


def seed_torch(device: torch.device, *place: int | str) -> None:
    """Seed torch's default generators from a place that is not a micro-batch, e.g. ("weights", seed)."""
    _seed_place(device, *place)
    _here.micro_batch = None
    _latest.clear()


@contextmanager
def unseeded() -> Iterator[None]:
    """Let blocks draw from wherever torch's generators stand, in this thread, while this is entered."""
    key, _here.key = getattr(_here, "key", None), None
    try:
        yield
    finally:
        _here.key = key


def _seed_place(device: torch.device, *place: int | str) -> None:
    _here.key = counter_rng.key(*place)
    _seed(device, _here.key)


def seed_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Seed every block but the first separately whenever it runs in training, by its place in the run."""
    for number, block in enumerate(blocks):
        if number:
            _BlockSeed(block, number, device)


class _BlockSeed:
    """Seeding before a block runs. The first run shows whether it draws anything; if not, the hooks are removed."""

    def __init__(self, block: nn.Module, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._before = block.register_forward_pre_hook(self._seed)
        # On an accelerator the host would wait for the answer, and seeding costs it nothing.
        self._after = block.register_forward_hook(self._look) if device.type == "cpu" else None
        self._state = torch.empty(0)

    def _seed(self, block: nn.Module, args: object) -> None:
        if block.training and getattr(_here, "key", None) is not None:
            self._begin()
            note(lambda: self._begin)
            if self._after is not None:
                self._state = torch.get_rng_state()

    _seed.notes_itself = True  # type: ignore[attr-defined]

    def _begin(self) -> None:
        _seed(self._device, counter_rng.key("block", _here.key, self._number))

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
