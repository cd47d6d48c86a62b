"""`parallel.recompute`: activations inside of blocks are dropped after the forward pass and computed again in backward.

Gradients keep their bits: a block runs again from the same input with the same random numbers, and layers that keep
running statistics do not count what they see a second time.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def apply_recompute(blocks: Sequence[nn.Module]) -> None:
    """Every block becomes one whose inner activations are not kept."""
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
    """What layers keep of the values they see goes into copies in here, and is forgotten."""
    kept = [(layer, dict(layer._buffers)) for layer in block.modules() if isinstance(layer, _BatchNorm)]
    for layer, buffers in kept:
        layer._buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        for layer, buffers in kept:
            layer._buffers = buffers
