"""BERT with both pretraining heads: masked words, and whether the second part follows the first.

Every stage takes the output of the one before, so running them in sequence is the forward pass.

Shapes: B micro-batch, T tokens in a row, S sequences in a row, M slots for masked positions, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.layers.transformer import FeedForward, FewRows, SelfAttention, Words, activation_layer
from podium.workloads.bert.section import BertModel


class Embedding(nn.Module):
    """The sum of the embeddings of a token, its position in the sequence and its segment."""

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
    """Attention and feed-forward layers, each followed by a layer norm of the sum with its input."""

    def __init__(self, section: BertModel) -> None:
        super().__init__()
        _, hidden, heads = section.shape
        self.attention = SelfAttention(hidden, heads, section.attention_dropout)
        self.dropout = nn.Dropout(section.dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=section.norm_eps)
        self.feed_forward = FeedForward(hidden, section.num_inner, section.activation, section.dropout)
        self.norm = nn.LayerNorm(hidden, eps=section.norm_eps)

    def forward(
        self, x: Tensor, sequence: Tensor, masked: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Built again in every block, which costs little: stages pass on only the sequence numbers.
        same = sequence[:, None, :, None] == sequence[:, None, None, :]
        x = self.attention_norm(x + self.dropout(self.attention(x, same)))
        return self.norm(x + self.feed_forward(x)), sequence, masked, first


class LastEncoder(Encoder, FewRows):
    """The encoder before the heads, which use only masked positions and first tokens.

    With `only_needed` it returns only these rows, in sequence, and their new positions.
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
    """Selects what the heads need: the first token of every sequence, through a layer, and the masked positions."""

    def __init__(self, section: BertModel) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, sequence: Tensor, masked: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return ((B, M, H), (B, S, H))."""
        return picked(x, masked), torch.tanh(self.dense(picked(x, first)))


class Classifier(nn.Module):
    """Both heads. With `tied_to`, words are predicted by the transposed embedding."""

    def __init__(self, section: BertModel, vocabulary: int, tied_to: nn.Embedding | None) -> None:
        super().__init__()
        _, hidden, _ = section.shape
        self.dense = nn.Linear(hidden, hidden)
        self.activation = activation_layer(section.activation)
        self.norm = nn.LayerNorm(hidden, eps=section.norm_eps)
        # In a list: the weight is the embedding's, and must not appear twice in checkpoints and in the optimiser.
        self._tied_to = [tied_to] if tied_to is not None else []
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocabulary, hidden))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.words = Words()
        self.next = nn.Linear(hidden, 2)

    def forward(self, at_masks: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Return ((B, M, V), (B, S, 2)), as logits."""
        weight = self._tied_to[0].weight if self._tied_to else self.weight
        at_masks = self.norm(self.activation(self.dense(at_masks)))
        return self.words(at_masks, weight, self.bias), self.next(pooled)


class Bert(nn.Module):
    """Maps rows of tokens to the logits of masked words, and of the second part being a random one."""

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
        """Return ((B, M, V), (B, S, 2)), as logits.

        `tokens`, `segment`, `position`, `sequence` are (B, T): a token attends to those with the same number in
        `sequence`. `masked` (B, M) and `first` (B, S) are positions in the row: of the words to predict, and of the
        first tokens of the sequences.
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
    """Select rows: (B, T, H) and (B, N) to (B, N, H).

    As an embedding lookup, whose gradients are deterministic: those of indexing are added in the order of the threads.
    """
    num_rows, num_tokens, _ = x.shape
    offsets = torch.arange(num_rows, device=places.device, dtype=places.dtype)[:, None] * num_tokens
    return F.embedding(places + offsets, x.flatten(0, 1))
