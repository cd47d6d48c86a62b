"""`parallel.recompute`: activations inside blocks are dropped after the forward pass and recomputed in backward.

Gradients keep their bits: a block runs again from the same input with the same random numbers, and layers that keep
running statistics do not count what they see a second time.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from podium.layers.norm import AnyBatchNorm
from podium.machine.device import random_states, set_random_states


def apply_recompute(blocks: Sequence[nn.Module]) -> None:
    """Make every block drop its inner activations, by a subclass of its present class."""
    for block in blocks:
        block.__class__ = type(type(block).__name__, (_Recomputed, type(block)), {})


class _Recomputed(nn.Module):
    def forward(self, *args: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args)

        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        states = random_states(device)

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            return nullcontext(), _again(self, device, states)

        # torch keeps the states of some kinds of devices only.
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


@contextmanager
def _again(block: nn.Module, device: torch.device, states: Sequence[Tensor]) -> Iterator[None]:
    """Let a block draw the same random numbers again in this context, and count nothing."""
    now = random_states(device)
    set_random_states(device, states)
    try:
        with _not_counting(block):
            yield
    finally:
        set_random_states(device, now)


@contextmanager
def _not_counting(block: nn.Module) -> Iterator[None]:
    """Let layers update copies of their running statistics in this context, and discard the copies."""
    kept = [
        (layer, name, buffer)
        for layer in block.modules()
        if isinstance(layer, AnyBatchNorm)
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    for layer, name, buffer in kept:
        setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, name, buffer in kept:
            setattr(layer, name, buffer)
