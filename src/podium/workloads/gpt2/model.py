"""GPT-2: a transformer that reads tokens and says which comes next. Owns `workload.model`.

Shapes: B micro-batch, S tokens of a window, V vocabulary.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from podium.errors import UserError
from podium.layers.transformer import FeedForward, SelfAttention
from podium.schema import Section

Size = Literal["small", "medium", "large", "xl", "custom"]
#: layers, hidden size, heads
_SIZES: dict[str, tuple[int, int, int]] = {
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}
_INIT_STD = 0.02
_EPS = 1e-5
Share = Annotated[float, Field(ge=0, lt=1)]


class Gpt2Model(Section):
    """`workload.model` of gpt2."""

    #: published sizes; custom: by the three numbers below
    size: Size = "small"
    #: custom: blocks, width, attention heads
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    #: most tokens the model can look back on, itself included; windows of training are this long
    context: PositiveInt = 1024
    #: tokens; null: as many as the data has (50,257 for files and generated tokens)
    vocabulary: PositiveInt | None = None
    #: rows of the embedding are filled up to a multiple of this; the added ones are never predicted
    pad_vocabulary_to: PositiveInt = 1
    #: of embeddings, attention and what every block adds
    dropout: Share = 0.1
    #: the head has the weights of the embedding
    tied: bool = True

    @model_validator(mode="before")
    @classmethod
    def _numbers_mean_custom(cls, values: Any) -> Any:
        """The numbers alone say enough."""
        if isinstance(values, dict) and "size" not in values and any(values.get(k) for k in ("layers", "hidden")):
            return {**values, "size": "custom"}
        return values

    @model_validator(mode="after")
    def _complete(self) -> "Gpt2Model":
        numbers = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        given = [name for name, value in numbers.items() if value is not None]
        missing = [name for name, value in numbers.items() if value is None]
        if self.size == "custom" and missing:
            raise ValueError(f"size: custom needs {', '.join(missing)} too")
        if self.size != "custom" and given:
            raise ValueError(f"{', '.join(given)} go with size: custom only, but size is {self.size}")
        if self.hidden is not None and self.heads is not None and self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} cannot be divided among heads = {self.heads}")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, hidden size, heads."""
        if self.size != "custom":
            return _SIZES[self.size]
        assert self.layers is not None
        assert self.hidden is not None
        assert self.heads is not None
        return self.layers, self.hidden, self.heads


class Embedding(nn.Module):
    """(B, S) tokens to (B, S, hidden): what the token is, and where it stands. `first` is the place of the first."""

    def __init__(self, num_tokens: int, context: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        # A slice of the table, not a look-up: its gradient then has one order of additions.
        positions = self.positions.weight[first : first + tokens.shape[1]]
        embedded: Tensor = self.dropout(self.tokens(tokens) + positions)
        return embedded


class Block(nn.Module):
    """Attention and feed-forward layers, each normalised before and added to what came in."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, _EPS)
        self.attention = SelfAttention(hidden, heads, dropout, causal=True)
        self.attention_dropout = nn.Dropout(dropout)
        self.feed_forward_norm = nn.LayerNorm(hidden, _EPS)
        self.feed_forward = FeedForward(hidden, 4 * hidden, "gelu_tanh", dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """(B, S, hidden) to (B, S, V) logits; rows that only fill the vocabulary up are left out."""

    def __init__(self, hidden: int, num_tokens: int, vocabulary: int, shared: nn.Embedding | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, _EPS)
        self.out = nn.Linear(hidden, num_tokens, bias=False, device=None if shared is None else "meta")
        if shared is not None:
            self.out.weight = shared.weight
        self._vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits if logits.shape[-1] == self._vocabulary else logits[..., : self._vocabulary]


class Gpt2(nn.Module):
    """(B, S) tokens to (B, S, V) logits of the token after each. A tied head shares the embedding's parameter."""

    def __init__(self, section: Gpt2Model, vocabulary: int) -> None:
        super().__init__()
        layers, hidden, heads = section.shape
        num_tokens = -(-vocabulary // section.pad_vocabulary_to) * section.pad_vocabulary_to
        self.section, self.vocabulary = section, vocabulary
        self.embedding = Embedding(num_tokens, section.context, hidden, section.dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, section.dropout) for _ in range(layers))
        self.head = Head(hidden, num_tokens, vocabulary, self.embedding.tokens if section.tied else None)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Normal with σ 0.02; what blocks add to one another is scaled down, so that the sum of all keeps its size."""
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
    """UserError where a text is longer than the model can look back on."""
    if tokens.shape[-1] > context:
        raise UserError(f"{tokens.shape[-1]:,} tokens are more than the model's context of {context:,}.")


def build_network(section: Gpt2Model, vocabulary: int) -> Gpt2:
    """The model, its weights drawn from torch's default generator."""
    return Gpt2(section, vocabulary)
