"""Faster forms of the layers of transformers; put on models by `operators.py`."""

from torch import Tensor, nn

from podium.engine import attention, elementwise, words
from podium.engine.conditions import leave_to_torch
from podium.layers.transformer import SelfAttention, Words


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
        special = self.padding_idx is not None or self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if special or leave_to_torch(self.weight) or not words.fits(self.weight):
            return super().forward(input)
        found: Tensor = words.LookUp.apply(self.weight, input)
        return found


class _Words(Words):
    def forward(self, x: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
        if leave_to_torch(x) or table.dtype != x.dtype or not words.fits(table):
            return super().forward(x, table, bias)
        products: Tensor = words.Linear.apply(x, table, bias)
        return products


class _Linear(nn.Linear):
    """A last layer with a word for every output; put on such as `words.fits` alone."""

    def forward(self, input: Tensor) -> Tensor:
        if leave_to_torch(input) or self.weight.dtype != input.dtype:
            return super().forward(input)
        products: Tensor = words.Linear.apply(input, self.weight, self.bias)
        return products


def faster(module: nn.Module) -> type[nn.Module] | None:
    """The class for a module of a transformer; None where there is none."""
    if type(module) is nn.Linear and words.fits(module.weight):
        return _Linear
    return _FASTER.get(type(module))


_FASTER: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: _SelfAttention,
    Words: _Words,
    nn.Dropout: _Dropout,
    nn.GELU: _Gelu,
    nn.Embedding: _Embedding,
}
