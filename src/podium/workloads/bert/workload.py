"""BERT's pretraining: predicts masked words, and whether a second part follows the first. Implements the contract.

The engine divides one sum by one count. Here the count is the number of masked tokens, and the pair loss of a sequence
is weighted by its number of masked tokens:

    loss = (Σ over masked tokens of their loss + Σ over sequences of masked tokens × loss of the pair) / masked tokens

If every sequence has the same number of them, this is the mean of one loss plus the mean of the other, as published,
and the result does not depend on how rows are packed, accumulated or distributed over replicas.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target
from podium.data.source import Source, empty_buffers, on_host
from podium.data.text.folder import TextFolder, load_tokenizer, open_text
from podium.data.text.make import standard_library_text
from podium.errors import UserError
from podium.layers.loss import cross_entropy_sum
from podium.recipe.section import Section
from podium.workloads.bert import huggingface
from podium.workloads.bert.corpus import SPECIAL, open_corpus, random_corpus
from podium.workloads.bert.model import Bert
from podium.workloads.bert.section import BertData, BertModel
from podium.workloads.bert.text_rows import UNUSED, Layout, TextRows
from podium.workloads.bert.tfrecord_rows import RecordRows

_PUBLISHED_VOCABULARY = 30_522
_INPUTS = ("tokens", "segment", "position", "sequence", "masked", "first")
_EVALUATION_SHARE = 20  # generated: one row of each evaluation split per this many training rows


def row_layout(data: BertData) -> Layout:
    """Return the layout of a row, as set by `workload.data`."""
    return Layout(data.length, data.max_sequences if data.packed else 1, data.mask_share, data.masked_slots)


class Workload:
    """The bert workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = BertModel
    DataSection: ClassVar[type[Section]] = BertData
    target = Target("valid/mlm_accuracy", 0.39, best="max")

    def __init__(self, model: BertModel, data: BertData) -> None:
        self._model, self._data = model, data
        self._layout = row_layout(data)
        if data.length > model.max_positions:
            raise UserError(
                f"workload.data.length = {data.length}: expected at most workload.model.max_positions = "
                f"{model.max_positions}"
            )
        self._sources: dict[Split, Source] = {}

    @cached_property
    def _text(self) -> TextFolder | None:
        """Return the folder of text, created first if it is missing in the cache; None with other sources."""
        data = self._data
        if data.source != "text":
            return None
        return open_text(data.path.expanduser()) if data.path else standard_library_text("wordpiece", data.vocabulary)

    @cached_property
    def _vocabulary(self) -> int:
        """Return the size of the model's vocabulary: from the recipe, or the number of tokens of the data."""
        own = self._text.vocabulary if self._text else _PUBLISHED_VOCABULARY
        least = own if self._text else len(SPECIAL) + 1
        vocabulary = self._model.vocabulary or own
        if vocabulary < least:
            raise UserError(f"workload.model.vocabulary = {vocabulary}: expected at least the {least:,} of the data")
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
        # The number of masked tokens in each of the (B, S) sequences.
        owner = batch["sequence"].gather(1, batch["masked"].long())
        numbers = torch.arange(1, follows.shape[1] + 1, device=owner.device)
        each = ((owner[:, None] == numbers[None, :, None]) & (target >= 0)[:, None]).sum(-1)
        count = int((on_host(batch, "target") >= 0).sum())
        loss = word_loss + (pair_losses * each.flatten()).sum()
        if model.training:
            return Loss(loss, count)
        num_pairs = int((on_host(batch, "follows") >= 0).sum())
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
        """Group parameters: biases have neither weight decay nor a trust ratio, norm weights have no weight decay."""
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
        from podium.workloads.bert import predict  # draws with matplotlib, which is slow to import

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
                raise UserError(
                    "workload.data.path is missing: workload.data.source = tfrecord needs the folder of the files"
                )
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
