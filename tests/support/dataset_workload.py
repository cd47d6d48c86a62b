"""A workload whose samples are those of a Dataset that draws from torch, numpy and random in every `__getitem__`."""

import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.padding import Pad, trimmed
from podium.data.source import Source
from podium.data.sources.dataset import DatasetSource
from podium.data.sources.mixed import MixedSource
from podium.recipe.section import Section

#: as a user names it
NAME = f"{__name__}:Workload"
WIDTH = 6


class Drawn:
    """Sequences of unequal length, with noise from three generators."""

    def __init__(self, num_samples: int, first: int = 0) -> None:
        self.num_samples, self.first = num_samples, first

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        number = index + self.first
        length = 3 + number * 7 % 14
        noise = torch.randn(length, WIDTH) + float(np.random.normal()) + random.gauss(0, 1)
        return {"steps": noise + number % 5, "label": number % 5}


class ModelSection(Section):
    dropout: float = 0.2


class DataSection(Section):
    workers: int = 0
    mix: dict[str, float] | None = None


class Network(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, 16)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(16, 5)

    def forward(self, steps: Tensor, mask: Tensor) -> Tensor:
        hidden = self.dropout(self.hidden(steps).relu()) * mask.unsqueeze(-1)
        return self.output(hidden.sum(1) / mask.sum(1, keepdim=True))


class Workload:
    ModelSection, DataSection = ModelSection, DataSection
    target: ClassVar[Target] = Target("valid/loss", 1.0)

    def __init__(self, model: ModelSection, data: DataSection) -> None:
        self._model, self._data = model, data

    def build_model(self) -> nn.Module:
        return Network(self._model.dropout)

    def source(self, split: Split) -> Source:
        if split != "train":
            return self._source(Drawn(21, first=1000))
        if self._data.mix:
            parts = {"a": self._source(Drawn(50)), "b": self._source(Drawn(70, first=300))}
            return MixedSource(parts, self._data.mix, seed=4)
        return self._source(Drawn(120))

    def _source(self, dataset: Drawn) -> Source:
        return DatasetSource(dataset, seed=3, workers=self._data.workers, pad={"steps": Pad(16)})

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        batch = trimmed(batch, 4)
        return batch["steps"], batch["steps_mask"]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        output = model(*self.inputs(batch))
        loss = nn.functional.cross_entropy(output, batch["label"], reduction="sum")
        return Loss(loss, len(output))

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [("network", model)]

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        return {
            "steps": torch.zeros(num_samples, 16, WIDTH),
            "steps_mask": torch.ones(num_samples, 16, dtype=torch.bool),
            "label": torch.zeros(num_samples, dtype=torch.int64),
        }

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        return Prediction([], [])
