"""GPT-2: a transformer that predicts the next token.

Shapes: B micro-batch, S tokens of a window, V vocabulary.
"""

import math

from torch import Tensor, nn

from podium.errors import UserError
from podium.layers.transformer import FeedForward, SelfAttention
from podium.workloads.gpt2.section import Gpt2Model

_INIT_STD = 0.02


class Embedding(nn.Module):
    """Maps (B, S) tokens to (B, S, hidden): token plus position embedding. `first` is the first token's position."""

    def __init__(self, num_tokens: int, context: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        # A slice of the table, not a lookup: its gradient is then added in a fixed order.
        positions = self.positions.weight[first : first + tokens.shape[1]]
        embedded: Tensor = self.dropout(self.tokens(tokens) + positions)
        return embedded


class Block(nn.Module):
    """Attention and feed-forward layers, each with a layer norm before it and added to its input."""

    def __init__(self, section: Gpt2Model, number: int) -> None:
        """`number`: its place among the blocks, from 0."""
        super().__init__()
        (_, hidden, heads), dropout = section.shape, section.dropout
        self.attention_norm = nn.LayerNorm(hidden, section.norm_eps)
        self.attention = SelfAttention(hidden, heads, dropout, causal=True, scale=_attention_scale(section, number))
        self.attention_dropout = nn.Dropout(dropout)
        self.feed_forward_norm = nn.LayerNorm(hidden, section.norm_eps)
        self.feed_forward = FeedForward(hidden, section.num_inner, section.activation, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.feed_forward(self.feed_forward_norm(x))


def _attention_scale(section: Gpt2Model, number: int) -> float | None:
    """Return the factor on products of queries and keys; None for the usual one."""
    if section.scale_attention and not section.scale_by_layer:
        return None
    _, hidden, heads = section.shape
    return ((hidden // heads) ** -0.5 if section.scale_attention else 1.0) / (
        number + 1 if section.scale_by_layer else 1
    )


class Head(nn.Module):
    """Maps (B, S, hidden) to (B, S, V) logits, without the padding rows of the vocabulary."""

    def __init__(self, section: Gpt2Model, num_tokens: int, vocabulary: int, shared: nn.Embedding | None) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.norm = nn.LayerNorm(hidden, section.norm_eps)
        self.out = nn.Linear(hidden, num_tokens, bias=False, device=None if shared is None else "meta")
        if shared is not None:
            self.out.weight = shared.weight
        self._vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits if logits.shape[-1] == self._vocabulary else logits[..., : self._vocabulary]


class Gpt2(nn.Module):
    """Maps (B, S) tokens to (B, S, V) logits of the token after each. A tied head shares the embedding's parameter."""

    def __init__(self, section: Gpt2Model, vocabulary: int) -> None:
        super().__init__()
        layers, hidden, _ = section.shape
        num_tokens = -(-vocabulary // section.pad_vocabulary_to) * section.pad_vocabulary_to
        self.section, self.vocabulary = section, vocabulary
        self.embedding = Embedding(num_tokens, section.context, hidden, section.dropout)
        self.blocks = nn.ModuleList(Block(section, number) for number in range(layers))
        self.head = Head(section, num_tokens, vocabulary, self.embedding.tokens if section.tied else None)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Draw weights from a normal distribution with σ = 0.02; layers that add to the residual are scaled down."""
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding | nn.Linear) and not (self.section.tied and module is self.head.out):
                nn.init.normal_(module.weight, std=_INIT_STD)
        for module in self.modules():
            if isinstance(module, SelfAttention | FeedForward):
                nn.init.normal_(module.out.weight, std=_INIT_STD / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def stages(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"block {number}", block) for number, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]


def check_window(tokens: Tensor, context: int) -> None:
    """Raise UserError if a text is longer than the model's context."""
    if tokens.shape[-1] > context:
        raise UserError(f"{tokens.shape[-1]:,} tokens are more than the model's context of {context:,}")


def build_network(section: Gpt2Model, vocabulary: int) -> Gpt2:
    """Build the model; its weights come from torch's default generator."""
    return Gpt2(section, vocabulary)
