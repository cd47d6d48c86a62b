"""BERT's pretraining: the words under masks, and whether a second part follows the first. The contract, tied together.

The engine divides one sum by one count. Here the count is that of the masked tokens, and the loss of a sequence's pair
enters as often as the sequence has masked tokens:

    loss = (Σ over masked tokens of their loss + Σ over sequences of masked tokens × loss of the pair) / masked tokens

Where every sequence has the same number of them, that is the mean of one loss plus the mean of the other, as published,
and it comes out the same however rows are packed, accumulated or spread over replicas.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from podium.data.arrays import Source, empty_buffers
from podium.data.text import TextFolder, load_tokenizer, open_text, standard_text
from podium.errors import UserError
from podium.layers.loss import cross_entropy_sum
from podium.schema import Section
from podium.workloads.base import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target
from podium.workloads.bert import huggingface
from podium.workloads.bert.corpus import SPECIAL, open_corpus, random_corpus
from podium.workloads.bert.model import Bert, BertModel
from podium.workloads.bert.published import RecordRows
from podium.workloads.bert.rows import UNUSED, Layout, TextRows

_PUBLISHED_VOCABULARY = 30_522
_INPUTS = ("tokens", "segment", "position", "sequence", "masked", "first")
_EVALUATION_SHARE = 20  # generated: one such row for so many training rows


class BertData(Section):
    """`workload.data` of bert."""

    #: text: a folder of `podium data make text`; tfrecord: the published files; generated: random tokens
    source: Literal["text", "tfrecord", "generated"] = "text"
    #: the folder; text without one: Python's standard library, made once and kept in the cache
    path: Path | None = None
    #: text without a path: tokens of the vocabulary that is made for it
    vocabulary: PositiveInt = 8192
    #: tokens in a row
    length: int = Field(128, ge=8, le=65_535)
    #: several sequences in a row, none of which sees the others
    packed: bool = False
    #: packed: at most so many
    max_sequences: int = Field(3, ge=1, le=64)
    #: share of the tokens that is to be named
    mask_share: float = Field(0.15, gt=0, le=0.5)
    #: room for so many of them in a sequence that fills its row; null: 20 at length 128, 76 at 512, else by the share
    masked_slots: PositiveInt | None = None
    #: share of sequences of a random shorter length
    short_share: float = Field(0.1, ge=0, le=1)
    #: what every epoch draws anew: masks, or the pairs of sentences too
    redraw: Literal["masks", "pairs", "none"] = "masks"
    #: what pairs, masks and random tokens are drawn from
    seed: NonNegativeInt = 0
    #: generated: training rows; valid and test come on top, a twentieth each
    samples: PositiveInt = 100_000
    #: at most so many rows of each split
    max_samples: PositiveInt | None = None

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if self.source == "tfrecord" and self.packed:
            raise ValueError("packed has a meaning with rows made here only, not with source: tfrecord")
        if self.source == "generated" and self.path is not None:
            raise ValueError("path goes with source: text or tfrecord, but source is generated; set path to null")
        return self

    @property
    def layout(self) -> Layout:
        return Layout(self.length, self.max_sequences if self.packed else 1, self.mask_share, self.masked_slots)


class Workload:
    """The contract of `podium.workloads.base` for bert."""

    ModelSection: ClassVar[type[Section]] = BertModel
    DataSection: ClassVar[type[Section]] = BertData
    target = Target("valid/mlm_accuracy", 0.39, best="max")

    def __init__(self, model: BertModel, data: BertData) -> None:
        self._model, self._data = model, data
        self._layout = data.layout
        if data.length > model.max_positions:
            raise UserError(
                f"`workload.data.length` is {data.length}, but the model has {model.max_positions} positions "
                "(`workload.model.max_positions`)."
            )
        self._sources: dict[Split, Source] = {}

    @cached_property
    def _text(self) -> TextFolder | None:
        """The folder of text, made now where it is the cache's and not there; None with other sources."""
        data = self._data
        if data.source != "text":
            return None
        return open_text(data.path.expanduser()) if data.path else standard_text("wordpiece", data.vocabulary)

    @cached_property
    def _vocabulary(self) -> int:
        """Of the model: as the recipe says, or as many tokens as the data has."""
        own = self._text.vocabulary if self._text else _PUBLISHED_VOCABULARY
        least = own if self._text else len(SPECIAL) + 1
        vocabulary = self._model.vocabulary or own
        if vocabulary < least:
            raise UserError(
                f"`workload.model.vocabulary` is {vocabulary:,}, but the data has {least:,} different tokens."
            )
        return vocabulary

    def build_model(self) -> nn.Module:
        return Bert(self._model, self._vocabulary)

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(batch[name] for name in _INPUTS)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        words, pairs = model(*self.inputs(batch))
        words, pairs = words.float(), pairs.float()
        target, follows = batch["target"], batch["follows"]
        word_loss = cross_entropy_sum(words.flatten(0, 1), target.flatten(), UNUSED, keeps=not model.training)
        pair_losses = F.cross_entropy(pairs.flatten(0, 1), follows.flatten(), ignore_index=UNUSED, reduction="none")
        # Numbers of masked tokens in (B, S) sequences.
        owner = batch["sequence"].gather(1, batch["masked"].long())
        numbers = torch.arange(1, follows.shape[1] + 1, device=owner.device)
        each = ((owner[:, None] == numbers[None, :, None]) & (target >= 0)[:, None]).sum(-1)
        # The host looks at the batch here: on an accelerator it waits for it.
        count = int((target >= 0).sum())
        loss = word_loss + (pair_losses * each.flatten()).sum()
        if model.training:
            return Loss(loss, count)
        num_pairs = int((follows >= 0).sum())
        return Loss(
            loss,
            count,
            {
                "mlm_loss": (word_loss, count),
                "mlm_accuracy": ((words.argmax(-1) == target).sum(dtype=torch.float32), count),
                "nsp_loss": (pair_losses.sum(), num_pairs),
                "nsp_accuracy": ((pairs.argmax(-1) == follows).sum(dtype=torch.float32), num_pairs),
            },
        )

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """Biases take neither weight decay nor a trust ratio; the weights of norms take no weight decay."""
        named = dict(model.named_parameters())
        biases = [name for name in named if name.endswith("bias")]
        norms = [name for name, param in named.items() if param.dim() == 1 and name not in biases]
        weights = [name for name, param in named.items() if param.dim() > 1]
        return [
            ParamGroup("weights", weights),
            ParamGroup("norms", norms, weight_decay=False, trust_ratio=True),
            ParamGroup("biases", biases, weight_decay=False),
        ]

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return cast(Bert, model).stages()

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        rows = TextRows(random_corpus(self._vocabulary, 0, "train"), self._layout, "train", num_rows=num_samples)
        buffers = empty_buffers(rows.fields, num_samples)
        rows.gather(np.arange(num_samples), buffers)
        return {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads.bert import predict  # draws with matplotlib, which takes long to import

        given, got = outputs("test", predict.MAX_ROWS, predict.best_words)
        path = self.tokenizer_file()
        return predict.predict(given, got, load_tokenizer(path) if path else None, folder)

    def to_huggingface(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return huggingface.to_huggingface(cast(Bert, model))

    def from_huggingface(self, model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        huggingface.from_huggingface(cast(Bert, model), config, tensors)

    def tokenizer_file(self) -> Path | None:
        folder = self._text.path if self._text is not None else self._data.path
        path = folder.expanduser() / "tokenizer.json" if folder is not None else None
        return path if path is not None and path.is_file() else None

    # --- samples ------------------------------------------------------------------------------------------------------

    def _open(self, split: Split) -> Source:
        data = self._data
        if data.source == "tfrecord":
            if data.path is None:
                raise UserError("`workload.data.source` is tfrecord: say where the files are by `workload.data.path`.")
            return RecordRows(data.path.expanduser(), self._layout, self._vocabulary, split, data.max_samples)
        num_rows = None
        if self._text is not None:
            corpus = open_corpus(self._text, split)
        else:
            corpus = random_corpus(self._vocabulary, data.seed, split)
            num_rows = data.samples if split == "train" else max(1, data.samples // _EVALUATION_SHARE)
        return TextRows(
            corpus,
            self._layout,
            split,
            seed=data.seed,
            short_share=data.short_share,
            redraw=data.redraw,
            num_rows=num_rows,
            max_rows=data.max_samples,
        )
