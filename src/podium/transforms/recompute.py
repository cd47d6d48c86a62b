"""`parallel.recompute`: activations inside blocks are dropped after the forward pass and recomputed in backward.

Gradients keep their bits: a block runs again from the same input with the same random numbers, and layers that keep
running statistics do not count what they see a second time.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from podium.layers.norm import AnyBatchNorm


def apply_recompute(blocks: Sequence[nn.Module]) -> None:
    """Make every block drop its inner activations, by a subclass of its present class."""
    for block in blocks:
        block.__class__ = type(type(block).__name__, (_Recomputed, type(block)), {})


class _Recomputed(nn.Module):
    def forward(self, *args: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args)

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            return nullcontext(), _not_counting(self)

        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts)


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
