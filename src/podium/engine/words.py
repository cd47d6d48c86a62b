"""Large tables of words: looked up at the beginning of a model, and often the weight of its last layer too. Called by
`transformers.py`.

The last layer's product is made block by block of the vocabulary: in one go the library first turns the whole table
round in memory. Gradients: torch's own of a look-up has all rows, most of them zeros, which for BERT are 94 MB to write
and to add to what the last layer gives to the same weight. Here the few rows are added to that in place.

    table (V, hidden)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

#: smaller tables are left to torch
_LEAST_VALUES, _LEAST_WORDS = 1 << 20, 1 << 12
#: of a block of the table and its products: what stays in the cache
_BLOCK_BYTES = 3 << 20


@dataclass
class _Shared:
    """What the uses of one table tell each other in a backward pass, in which the last layer comes first."""

    #: number of the pass in which a last layer gave the table a gradient, and this
    task: int = -1
    grad: Tensor | None = None
    #: (words, what is to be added to their rows) of look-ups in that pass
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def given(self, grad: Tensor) -> None:
        if not self.takes():  # what a pass that failed has left is forgotten
            self.task, self.grad, self.rows = torch._C._current_graph_task_id(), grad, []

    def takes(self) -> bool:
        """Whether `finish` will be called in this backward pass, with a gradient: only then may rows be left to it."""
        return self.grad is not None and self.task == torch._C._current_graph_task_id()

    def finish(self, grad: Tensor) -> Tensor | None:
        """Adds the rows to the whole gradient of the table, just before it is kept; None: that was done in place."""
        own, rows = self.grad, self.rows
        takes, self.grad, self.rows = self.takes(), None, []
        if not takes or not rows:
            return None
        # Others may still need a tensor that we did not make.
        result = grad if own is not None and own.data_ptr() == grad.data_ptr() else grad.clone()
        for words, sums in rows:
            result[words] += sums
        return None if result is grad else result


_SHARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shared(table: Tensor) -> _Shared | None:
    """None where the table is not a parameter that gets a gradient."""
    if not (table.is_leaf and table.requires_grad):
        return None
    if table not in _SHARED:
        _SHARED[table] = shared = _Shared()
        table.register_hook(shared.finish)
    found: _Shared = _SHARED[table]
    return found


def fits(table: Tensor) -> bool:
    return table.numel() >= _LEAST_VALUES and len(table) >= _LEAST_WORDS


def _blocks(table: Tensor, rows: Tensor) -> Iterator[slice]:
    """Of the table's words, for products with so many rows."""
    size = max(16, _BLOCK_BYTES // table.element_size() // (len(rows) + table.shape[1]) // 16 * 16)
    return (slice(start, start + size) for start in range(0, len(table), size))


class LookUp(torch.autograd.Function):
    """Rows of the table, for tokens of any shape."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.shared, ctx.num_words = _shared(table), len(table)
        ctx.save_for_backward(tokens)
        return torch.embedding(table, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        if ctx.shared is None or not ctx.shared.takes():
            return torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.num_words, -1, False), None
        # Each row's sum has one order of additions, whatever the number of threads.
        words, places = torch.unique(tokens, sorted=True, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad, places, len(words), -1, False)
        ctx.shared.rows.append((words.long(), sums))
        return None, None


class Linear(torch.autograd.Function):
    """x (…, hidden) to (…, V): products with all rows of the table, and a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, table)
        ctx.shared = _shared(table)
        output = x.new_empty(*x.shape[:-1], len(table))
        flat = output.view(-1, len(table))
        for block in _blocks(table, rows):
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
        of_table = None
        if wants_table:
            of_table = torch.empty_like(table, requires_grad=False)
            for block in _blocks(table, rows):
                torch.mm(flat[:, block].t(), rows, out=of_table[block])
        if ctx.shared is not None and of_table is not None:
            ctx.shared.given(of_table)
        return of_x, of_table, flat.sum(0) if wants_bias else None
