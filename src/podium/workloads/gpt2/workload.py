"""GPT-2: predicts the next token of a text. Implements the contract."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.source import Source
from podium.errors import UserError
from podium.layers.loss import cross_entropy_sum
from podium.recipe.section import Section
from podium.workloads.gpt2 import huggingface
from podium.workloads.gpt2.data import PUBLISHED_VOCABULARY, Tokens
from podium.workloads.gpt2.model import Gpt2, build_network
from podium.workloads.gpt2.section import Gpt2Data, Gpt2Model


class Workload:
    """The gpt2 workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = Gpt2Model
    DataSection: ClassVar[type[Section]] = Gpt2Data
    target = Target("valid/loss", 4.2)

    def __init__(self, model: Gpt2Model, data: Gpt2Data) -> None:
        self._model, self._data = model, data
        self._tokens = Tokens(data)
        self._length = data.length or model.context
        if self._length > model.context:
            raise UserError(
                f"workload.data.length = {self._length}: expected at most workload.model.context = {model.context}"
            )
        self._vocabulary: int | None = None
        self._sources: dict[Split, Source] = {}

    def build_model(self) -> nn.Module:
        return build_network(self._model, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Return the size of the model's vocabulary: from the recipe, or the number of tokens of the data."""
        if self._vocabulary is None:
            found = self._tokens.vocabulary
            self._vocabulary = self._model.vocabulary or found or self._tokens.counted_vocabulary()
            self._vocabulary = self._vocabulary or PUBLISHED_VOCABULARY
            if found is not None and self._vocabulary < found:
                raise UserError(
                    f"workload.model.vocabulary = {self._vocabulary}: expected at least the {found:,} of the data"
                )
        return self._vocabulary

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._tokens.source(split, self._length, self.vocabulary)
        return self._sources[split]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["tokens"][:, :-1].long(),)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        target = batch["tokens"][:, 1:].long().reshape(-1)
        # Always in single precision: the sum runs over thousands of tokens.
        logits = model(*self.inputs(batch)).float().flatten(0, 1)
        loss = cross_entropy_sum(logits, target, keeps=not model.training)
        if model.training:
            return Loss(loss, len(target))
        right = (logits.argmax(dim=1) == target).sum(dtype=torch.float32)
        return Loss(loss, len(target), {"accuracy": (right, len(target))})

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return cast(Gpt2, model).stages()

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(num_samples, self._length + 1, dtype=torch.int32)}

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads.gpt2 import predict  # draws with matplotlib, which is slow to import

        return predict.predict(
            cast(Gpt2, model), self.source("test"), self._tokens.tokenizer, self._tokens.end, self._data.sample, folder
        )

    def to_huggingface(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = huggingface.to_huggingface(cast(Gpt2, model))
        end = self._tokens.end
        return {**config, "bos_token_id": end, "eos_token_id": end}, tensors

    def from_huggingface(self, model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        huggingface.from_huggingface(cast(Gpt2, model), config, tensors)

    def tokenizer_file(self) -> Path | None:
        return self._tokens.tokenizer_file
