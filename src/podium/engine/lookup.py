"""Gradients of large embeddings with as many rows as were looked up. Called by `transformers.py`.

torch's own has all rows, most of them zeros: for BERT's 94 MB that are written, and added to the gradient that the head
gives to the same weight. A sparse one is added there in place.
"""

from typing import Any

import torch
from torch import Tensor

#: smaller tables, or those of which more is looked up, are left to torch
_LEAST_VALUES, _MOST_SHARE = 1 << 20, 4
_MARK = "_podium_dense"


def fits(weight: Tensor, tokens: Tensor) -> bool:
    return weight.numel() >= _LEAST_VALUES and tokens.numel() * _MOST_SHARE <= len(weight)


class Lookup(torch.autograd.Function):
    """Rows of a table (V, hidden)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return torch.embedding(weight, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        # Each row's sum has one order of additions, whatever the number of threads.
        rows, places = torch.unique(tokens, sorted=True, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad, places, len(rows), -1, False)
        return torch.sparse_coo_tensor(rows[None], sums, ctx.shape, is_coalesced=True, check_invariants=False), None


def looked_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """The optimiser and other instances get a dense gradient, also where nothing else adds to it."""
    if not hasattr(weight, _MARK):
        weight.register_hook(lambda grad: grad.to_dense() if grad.is_sparse else grad)
        setattr(weight, _MARK, True)
    found: Tensor = Lookup.apply(weight, tokens)
    return found
