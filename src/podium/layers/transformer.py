"""Layers that transformers share: self-attention and feed-forward layers. Each model defines its own blocks.

Shapes: B micro-batch, S sequence, H heads, D size of a head, hidden = H · D.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.errors import UserError
from podium.layers.slot import Slot

#: takes (x, weight, bias), as `linear` does
LINEAR = Slot()
#: gelu: with the error function; gelu_tanh: approximated with a hyperbolic tangent
Activation = Literal["gelu", "gelu_tanh", "relu"]


def activation_layer(name: Activation) -> nn.Module:
    """Return an activation as a layer."""
    return nn.ReLU() if name == "relu" else nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (…, in) by a weight (out, in) that is only a part of a layer's, and add a bias."""
    result = LINEAR(x, weight, bias)
    return F.linear(x, weight, bias) if result is None else result


class SelfAttention(nn.Module):
    """Self-attention over all positions of a sequence; with `causal`, over each position and those before it.

    `dropout` applies to the attention weights. The output has none: the surrounding block adds its own. `scale`: factor
    on the products of queries and keys; None: one over the root of a head's size.
    """

    def __init__(
        self, hidden: int, heads: int, dropout: float = 0.0, causal: bool = False, scale: float | None = None
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise UserError(f"a hidden size of {hidden}: expected a multiple of the {heads} attention heads")
        self.heads, self.dropout, self.causal, self.scale = heads, dropout, causal, scale
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, S, hidden) to the same shape. `mask` is boolean, broadcasts to (B, H, S, S), true where allowed."""
        projected: Tensor = self.out(self.attend(x, mask))
        return projected

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run `forward` without the last linear layer, for callers that need few of its rows."""
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
            scale=self.scale,
        )
        return attended.transpose(1, 2).flatten(2)

    def attend_from(self, rows: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Do the same for a few rows (B, N, hidden), which attend to all of x; `mask` broadcasts to (B, H, N, S)."""
        assert not self.causal, "which rows come before others is not known here"
        parts = [rows.shape[-1], 2 * rows.shape[-1]]
        weights, biases = self.qkv.weight.split(parts), self.qkv.bias.split(parts)
        query = linear(rows, weights[0], biases[0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = linear(x, weights[1], biases[1]).unflatten(-1, (2, self.heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )
        return attended.transpose(1, 2).flatten(2)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, S, hidden) to three times (B, H, S, D); for callers that cache keys and values."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def joined(self, attended: Tensor) -> Tensor:
        """Map (B, H, S, D) to (B, S, hidden) through the last linear layer."""
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"heads={self.heads}, dropout={self.dropout}, causal={self.causal}{scale}"


class FewRows(nn.Module):
    """A block of which the next one needs only a few rows; with `only_needed` it computes and returns no others.

    The engine sets it: a model as built computes all rows.
    """

    only_needed = False


class Words(nn.Module):
    """Maps (…, hidden) to logits (…, V) with the embedding (V, hidden) of another module, and a bias."""

    def forward(self, x: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, table, bias)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them and dropout at the end."""

    def __init__(self, hidden: int, inner: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Linear(hidden, inner)
        self.activation = activation_layer(activation)
        self.out = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.dropout(self.out(self.activation(self.wide(x))))
        return projected
