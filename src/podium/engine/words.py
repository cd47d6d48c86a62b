"""Large tables of words: looked up at the beginning of a model, and often the weight of its last layer too. Called by
`transformers.py`.

The last layer's product is made block by block of the vocabulary: in one go the library first turns the whole table
round in memory. Gradients: torch's own of a look-up has all rows, most of them zeros, which for BERT are 94 MB to write
and to add to what the last layer gives to the same weight. Here the few rows are added to that in place.

    table (V, hidden)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: smaller tables are left to torch
_LEAST_VALUES, _LEAST_WORDS = 1 << 20, 1 << 12
#: of a block of the table and its products: what stays in the cache
_BLOCK_BYTES = 3 << 20
_USES = "_podium_uses"


@dataclass
class _Uses:
    """Of a table in one forward pass: what its last layer leaves for the look-up's backward, which comes later."""

    num_layers: int = 0
    grad: Tensor | None = None
    #: of the backward pass that made it
    task: int = -1


def fits(table: Tensor) -> bool:
    return table.numel() >= _LEAST_VALUES and len(table) >= _LEAST_WORDS


class LookUp(torch.autograd.Function):
    """Rows of the table, for tokens of any shape."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.uses, ctx.num_words = _Uses(), len(table)
        ctx.save_for_backward(tokens)
        setattr(table, _USES, ctx.uses)
        return torch.embedding(table, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        of_table, ctx.uses.grad = ctx.uses.grad, None
        # What the layer has left is waiting in this backward pass to be added to ours, and nobody has seen it yet:
        # that is so if both are of the same pass, and no other layer has given a part of its own.
        if of_table is None or ctx.uses.num_layers > 1 or ctx.uses.task != torch._C._current_graph_task_id():
            return torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.num_words, -1, False), None
        # Each row's sum has one order of additions, whatever the number of threads.
        words, places = torch.unique(tokens, sorted=True, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad, places, len(words), -1, False)
        of_table.index_put_((words,), of_table[words] + sums)
        return None, None


class Linear(torch.autograd.Function):
    """x (…, hidden) to (…, V): products with all rows of the table, and a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, table)
        ctx.uses = getattr(table, _USES, None)
        if ctx.uses is not None:
            ctx.uses.num_layers += 1
        output = x.new_empty(*x.shape[:-1], len(table))
        flat = output.view(-1, len(table))
        num_block = max(16, _BLOCK_BYTES // 4 // (len(rows) + rows.shape[1]) // 16 * 16)
        for start in range(0, len(table), num_block):
            block = slice(start, start + num_block)
            if bias is None:
                torch.mm(rows, table[block].t(), out=flat[:, block])
            else:
                torch.addmm(bias[block], rows, table[block].t(), out=flat[:, block])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, table = ctx.saved_tensors
        wants_x, wants_table, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, len(table))
        of_x = (flat @ table).view(*grad.shape[:-1], -1) if wants_x else None
        of_table = flat.t() @ rows if wants_table else None
        if ctx.uses is not None:
            ctx.uses.grad, ctx.uses.task = of_table, torch._C._current_graph_task_id()
        return of_x, of_table, flat.sum(0) if wants_bias else None
