"""What transformers share: self-attention and the feed-forward layers. Blocks of them are each model's own.

Shapes: B micro-batch, S sequence, H heads, D size of a head, hidden = H · D.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.errors import UserError

#: gelu: with the error function; gelu_tanh: the approximation by a hyperbolic tangent
Activation = Literal["gelu", "gelu_tanh"]


class SelfAttention(nn.Module):
    """Every place of a sequence looks at the others; with `causal` at itself and those before it.

    `dropout` is that of the attention's weights. What comes out takes none: the block around it adds its own.
    """

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        if hidden % heads:
            raise UserError(f"a hidden size of {hidden} cannot be divided among {heads} attention heads.")
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, S, hidden) to the same. `mask` is boolean and broadcasts to (B, H, S, S): true where one may look."""
        projected: Tensor = self.out(self.attend(x, mask))
        return projected

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`forward` without the last linear layer, for those who need few of its rows."""
        query, key, value = self.queries_keys_values(x)
        if self.causal and mask is not None:
            size = x.shape[1]
            mask = mask & torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        return attended.transpose(1, 2).flatten(2)

    def attend_from(self, rows: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same for a few rows (B, N, hidden) of x, which look at all of it; `mask` broadcasts to (B, H, N, S)."""
        assert not self.causal, "which rows come before others is not known here"
        parts = [rows.shape[-1], 2 * rows.shape[-1]]
        weights, biases = self.qkv.weight.split(parts), self.qkv.bias.split(parts)
        query = F.linear(rows, weights[0], biases[0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = F.linear(x, weights[1], biases[1]).unflatten(-1, (2, self.heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return attended.transpose(1, 2).flatten(2)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, hidden) to three times (B, H, S, D); apart from `forward` for those who keep keys and values."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def joined(self, attended: Tensor) -> Tensor:
        """(B, H, S, D) to (B, S, hidden), through the last linear layer."""
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dropout={self.dropout}, causal={self.causal}"


class FewRows(nn.Module):
    """A block of whose rows the next one looks at few; with `only_needed` it computes and returns no others.

    Set from outside, by the engine: a model as built computes all of them.
    """

    only_needed = False


class Words(nn.Module):
    """(…, hidden) to (…, V), by a table (V, hidden) that belongs to another module, and a bias."""

    def forward(self, x: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, table, bias)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them and dropout at the end."""

    def __init__(self, hidden: int, inner: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Linear(hidden, inner)
        self.activation = nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
        self.out = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.dropout(self.out(self.activation(self.wide(x))))
        return projected
