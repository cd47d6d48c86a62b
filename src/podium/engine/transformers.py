"""Faster forms of the layers of transformers; put on models by `operators.py`."""

from typing import Any

from torch import Tensor, nn

from podium.engine import attention, elementwise, lookup
from podium.engine.conditions import leave_to_torch
from podium.layers.transformer import SelfAttention


class _SelfAttention(SelfAttention):
    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if leave_to_torch(x) or not attention.fits(x.shape, self.heads, mask):
            return super().attend(x, mask)
        dropout = self.dropout if self.training else 0.0
        attended: Tensor = attention.Attention.apply(self.qkv(x), mask, self.heads, self.causal, dropout)
        return attended


class _Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        plain = not self.training or self.inplace or not 0 < self.p < 1
        if plain or leave_to_torch(input) or not elementwise.fits(input):
            return super().forward(input)
        dropped: Tensor = elementwise.Dropout.apply(input, self.p)
        return dropped


class _Gelu(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        if self.approximate != "tanh" or leave_to_torch(input) or not elementwise.fits(input):
            return super().forward(input)
        activated: Tensor = elementwise.Gelu.apply(input)
        return activated


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        special: Any = (self.padding_idx, self.max_norm, self.scale_grad_by_freq or None, self.sparse or None)
        if any(value is not None for value in special) or leave_to_torch(self.weight):
            return super().forward(input)
        if not lookup.fits(self.weight, input):
            return super().forward(input)
        return lookup.looked_up(self.weight, input)


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: _SelfAttention,
    nn.Dropout: _Dropout,
    nn.GELU: _Gelu,
    nn.Embedding: _Embedding,
}
