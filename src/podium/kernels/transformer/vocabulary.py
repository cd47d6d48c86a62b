"""Large word embedding tables: looked up at the start of a model, and often also the weight of its last layer. Applied
to models by `kernels/install.py`.

The last layer's product is computed in blocks of the vocabulary: for the whole at once, the library would first
transpose the table in memory. torch's gradient of a look-up has all rows, most of them zeros: for BERT 94 MB to write
and to add to the last layer's gradient of the same weight. Here the few rows are added to that in place.

    table (V, hidden)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from podium.kernels import registry
from podium.kernels.eligibility import leave_to_torch
from podium.kernels.multiply import product, product_into
from podium.layers.transformer import Words

#: smaller tables are left to torch
LEAST_VALUES, LEAST_WORDS = 1 << 20, 1 << 12
#: bytes of a block of the table and its products, so that they stay in the cache
_BLOCK_BYTES = 3 << 20


@dataclass
class _Shared:
    """State that the uses of one table share in a backward pass, in which the last layer comes first."""

    #: number of the pass in which a last layer gave the table a gradient, and that gradient
    task: int = -1
    grad: Tensor | None = None
    #: (words, values to add to their rows) of look-ups in that pass
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def given(self, grad: Tensor) -> None:
        if not self.takes():  # discards what a failed pass has left
            self.task, self.grad, self.rows = torch._C._current_graph_task_id(), grad, []

    def takes(self) -> bool:
        """Return whether `finish` will be called with a gradient in this pass: only then may rows be left to it."""
        return self.grad is not None and self.task == torch._C._current_graph_task_id()

    def finish(self, grad: Tensor) -> Tensor | None:
        """Add the rows to the table's whole gradient, just before it is kept; return None if done in place."""
        own, rows = self.grad, self.rows
        takes, self.grad, self.rows = self.takes(), None, []
        if not takes or not rows:
            return None
        # A tensor that we did not make may still be needed elsewhere.
        result = grad if own is not None and own.data_ptr() == grad.data_ptr() else grad.clone()
        for words, sums in rows:
            result[words] += sums
        return None if result is grad else result


_SHARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shared(table: Tensor) -> _Shared | None:
    """Return the state of a table, or None if it is not a parameter that gets a gradient."""
    if not (table.is_leaf and table.requires_grad):
        return None
    if table not in _SHARED:
        _SHARED[table] = shared = _Shared()
        table.register_hook(shared.finish)
    found: _Shared = _SHARED[table]
    return found


def fits(table: Tensor) -> bool:
    return table.numel() >= LEAST_VALUES and len(table) >= LEAST_WORDS


def _blocks(table: Tensor, rows: Tensor) -> Iterator[slice]:
    """Return the blocks of the table's words, for products with this many rows."""
    size = max(16, _BLOCK_BYTES // table.element_size() // (len(rows) + table.shape[1]) // 16 * 16)
    return (slice(start, start + size) for start in range(0, len(table), size))


class LookUp(torch.autograd.Function):
    """A look-up of the table's rows, for tokens of any shape."""

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
        # Each row's additions have a fixed order, for any number of threads.
        words, places = torch.unique(tokens, sorted=True, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad, places, len(words), -1, False)
        ctx.shared.rows.append((words.long(), sums))
        return None, None


class Linear(torch.autograd.Function):
    """A product from x (…, hidden) to (…, V) with all rows of the table, plus a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, table)
        ctx.shared = _shared(table)
        if registry.find("products") is not None:  # which divides its work itself
            return product(rows, table.t(), bias).view(*x.shape[:-1], len(table))
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
        of_x = product(flat, table).view(*grad.shape[:-1], -1) if wants_x else None
        of_table = None
        if wants_table:
            of_table = torch.empty_like(table, requires_grad=False)
            if registry.find("products") is not None:
                product_into(of_table, flat.t(), rows)
            else:
                for block in _blocks(table, rows):
                    torch.mm(flat[:, block].t(), rows, out=of_table[block])
        if ctx.shared is not None and of_table is not None:
            ctx.shared.given(of_table)
        return of_x, of_table, flat.sum(0) if wants_bias else None


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain layer to one of the classes below."""
    if type(module) is nn.Linear and fits(module.weight):
        module.__class__ = _Linear
    faster = {nn.Embedding: _Embedding, Words: _Words}.get(type(module))
    if faster is not None:
        module.__class__ = faster


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        special = self.padding_idx is not None or self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if special or leave_to_torch(self.weight) or not fits(self.weight):
            return super().forward(input)
        found: Tensor = LookUp.apply(self.weight, input)
        return found


class _Words(Words):
    def forward(self, x: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
        if leave_to_torch(x) or table.dtype != x.dtype or not fits(table):
            return super().forward(x, table, bias)
        products: Tensor = Linear.apply(x, table, bias)
        return products


class _Linear(nn.Linear):
    """A last layer with a word for every output; only for layers whose weight `fits`."""

    def forward(self, input: Tensor) -> Tensor:
        if leave_to_torch(input) or self.weight.dtype != input.dtype:
            return super().forward(input)
        products: Tensor = Linear.apply(input, self.weight, self.bias)
        return products
