"""BERT with both heads of its pretraining: words under masks, and whether the second part follows the first.

Every stage takes what the one before returns, so running them one after another is the forward pass.

Shapes: B micro-batch, T tokens in a row, S sequences in a row, M slots for masked positions, H hidden, V vocabulary.
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from podium.layers.transformer import FeedForward, FewRows, SelfAttention, Words
from podium.schema import Section

#: layers, hidden, heads of the published sizes
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
_INNER = 4


class BertModel(Section):
    """`workload.model` of bert."""

    #: base and large as published; custom: by `layers`, `hidden` and `heads`
    size: Literal["base", "large", "custom"] = "base"
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    #: width inside of the feed-forward layers; null: 4 times hidden
    inner: PositiveInt | None = None
    #: tokens; null: the data's
    vocabulary: PositiveInt | None = None
    #: longest sequence
    max_positions: PositiveInt = 512
    #: kinds of parts in a sequence
    segments: PositiveInt = 2
    #: added to variances in layer norms
    norm_eps: PositiveFloat = 1e-12
    #: share of values zeroed in training, after embeddings and within blocks
    dropout: float = Field(0.1, ge=0, lt=1)
    #: share of attention weights zeroed in training
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    #: spread of the first weights; narrow models learn sooner with a larger one
    init_std: PositiveFloat = 0.02
    #: the words' embedding is the last layer of the head that names words
    tied: bool = True

    @model_validator(mode="after")
    def _sized(self) -> Self:
        given = {name: getattr(self, name) for name in ("layers", "hidden", "heads")}
        if self.size == "custom":
            if missing := [name for name, value in given.items() if value is None]:
                raise ValueError(f"size: custom needs {', '.join(missing)}")
        else:
            for (name, value), published in zip(given.items(), SIZES[self.size], strict=True):
                if value not in (None, published):
                    raise ValueError(
                        f"size: {self.size} has {name} = {published}, not {value}; size: custom takes any number"
                    )
        if self.shape[1] % self.shape[2]:
            raise ValueError(f"hidden = {self.shape[1]} cannot be divided among {self.shape[2]} heads")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, hidden, heads)"""
        if self.size != "custom":
            return SIZES[self.size]
        assert self.layers
        assert self.hidden
        assert self.heads
        return self.layers, self.hidden, self.heads

    @property
    def num_inner(self) -> int:
        return self.inner or _INNER * self.shape[1]


class Embedding(nn.Module):
    """What a token is, where it stands in its sequence and in which part, as one vector."""

    def __init__(self, section: BertModel, vocabulary: int) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.word = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(section.max_positions, hidden)
        self.segment = nn.Embedding(section.segments, hidden)
        self.norm = nn.LayerNorm(hidden, eps=section.norm_eps)
        self.dropout = nn.Dropout(section.dropout)

    def forward(
        self, tokens: Tensor, segment: Tensor, position: Tensor, sequence: Tensor, masked: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.word(tokens) + self.position(position) + self.segment(segment.int())
        return self.dropout(self.norm(x)), sequence, masked, first


class Encoder(nn.Module):
    """Attention and feed-forward layers, each with a layer norm after the sum with what went in."""

    def __init__(self, section: BertModel) -> None:
        super().__init__()
        _, hidden, heads = section.shape
        self.attention = SelfAttention(hidden, heads, section.attention_dropout)
        self.dropout = nn.Dropout(section.dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=section.norm_eps)
        self.feed_forward = FeedForward(hidden, section.num_inner, "gelu", section.dropout)
        self.norm = nn.LayerNorm(hidden, eps=section.norm_eps)

    def forward(
        self, x: Tensor, sequence: Tensor, masked: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Made anew in every block, which costs little: between stages only numbers of sequences travel.
        same = sequence[:, None, :, None] == sequence[:, None, None, :]
        x = self.attention_norm(x + self.dropout(self.attention(x, same)))
        return self.norm(x + self.feed_forward(x)), sequence, masked, first


class LastEncoder(Encoder, FewRows):
    """The one before the heads, which look at masked positions and first tokens alone.

    With `only_needed` it returns these rows, one after the other, and where they are now.
    """

    def forward(
        self, x: Tensor, sequence: Tensor, masked: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self.only_needed:
            return super().forward(x, sequence, masked, first)
        places = torch.cat([masked, first.to(masked.dtype)], dim=1)
        rows, owners = picked(x, places), sequence.gather(1, places.long())
        same = owners[:, None, :, None] == sequence[:, None, None, :]
        x = self.attention_norm(rows + self.dropout(self.attention.out(self.attention.attend_from(rows, x, same))))
        numbers = torch.arange(places.shape[1], dtype=masked.dtype, device=masked.device).expand_as(places)
        masked, first = numbers[:, : masked.shape[1]], numbers[:, masked.shape[1] :]
        return self.norm(x + self.feed_forward(x)), sequence, masked, first


class Pooler(nn.Module):
    """What the heads need of a row: its first token of every sequence, through a layer, and its masked positions."""

    def __init__(self, section: BertModel) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, sequence: Tensor, masked: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """((B, M, H), (B, S, H))"""
        return picked(x, masked), torch.tanh(self.dense(picked(x, first)))


class Classifier(nn.Module):
    """Both heads. With `tied_to`, words are named by their embedding turned round."""

    def __init__(self, section: BertModel, vocabulary: int, tied_to: nn.Embedding | None) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=section.norm_eps)
        # In a list: the weight is the embedding's, and belongs there alone in checkpoints and for the optimiser.
        self._tied_to = [tied_to] if tied_to is not None else []
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocabulary, hidden))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.words = Words()
        self.next = nn.Linear(hidden, 2)

    def forward(self, at_masks: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """((B, M, V), (B, S, 2)), as logits"""
        weight = self._tied_to[0].weight if self._tied_to else self.weight
        at_masks = self.norm(F.gelu(self.dense(at_masks)))
        return self.words(at_masks, weight, self.bias), self.next(pooled)


class Bert(nn.Module):
    """Rows of tokens to the logits of words under masks, and of the second part being a random one."""

    def __init__(self, section: BertModel, vocabulary: int) -> None:
        super().__init__()
        self.section = section
        self.embedding = Embedding(section, vocabulary)
        layers = section.shape[0]
        self.encoders = nn.ModuleList([*(Encoder(section) for _ in range(layers - 1)), LastEncoder(section)])
        self.pooler = Pooler(section)
        self.classifier = Classifier(section, vocabulary, self.embedding.word if section.tied else None)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=section.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    @property
    def vocabulary(self) -> int:
        return self.embedding.word.num_embeddings

    def forward(
        self, tokens: Tensor, segment: Tensor, position: Tensor, sequence: Tensor, masked: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """((B, M, V), (B, S, 2)).

        `tokens`, `segment`, `position`, `sequence` are (B, T): a token looks at those with the same number in
        `sequence`. `masked` (B, M) and `first` (B, S) are places in the row: those to name, and the sequences' first.
        """
        x = self.embedding(tokens, segment, position, sequence, masked, first)
        for encoder in self.encoders:
            x = encoder(*x)
        logits: tuple[Tensor, Tensor] = self.classifier(*self.pooler(*x))
        return logits

    def stages(self) -> list[tuple[str, nn.Module]]:
        encoders = [(f"Encoder {number}", encoder) for number, encoder in enumerate(self.encoders)]
        return [("Embedding", self.embedding), *encoders, ("Pooler", self.pooler), ("Classifier", self.classifier)]


def picked(x: Tensor, places: Tensor) -> Tensor:
    """(B, T, H) and (B, N) to (B, N, H).

    As an embedding, whose gradients come out the same at every run: those of indexing are added as threads come by.
    """
    num_rows, num_tokens, _ = x.shape
    offsets = torch.arange(num_rows, device=places.device, dtype=places.dtype)[:, None] * num_tokens
    return F.embedding(places + offsets, x.flatten(0, 1))
