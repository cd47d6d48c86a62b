"""The contract between Podium and what it trains, and the table of workloads.

A workload is one folder and one line in `WORKLOADS`. Its module `workload.py` offers a class `Workload` built from
its two recipe sections. It imports `data`, `layers` and this module, never the engine or the training loop.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from podium.data.arrays import Source
from podium.schema import Section
from podium.table import Table

Split = Literal["train", "valid", "test"]
Batch = Mapping[str, Tensor]

#: name -> module that holds its `Workload` class
WORKLOADS = {
    "bert": "podium.workloads.bert.workload",
    "mnist": "podium.workloads.mnist.workload",
    "cnn": "podium.workloads.cnn.workload",
    "neuron": "podium.workloads.neuron.workload",
    "gpt2": "podium.workloads.gpt2.workload",
    "cosmology": "podium.workloads.cosmology.workload",
}


@dataclass
class Loss:
    """What one micro-batch says: sums with their counts, divided once at the very end.

    `sum` carries the gradient; counts are known to the host, so nothing waits for the device.
    """

    sum: Tensor
    count: int
    metrics: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What a good run reaches: `metric` at most (or at least) `value`."""

    metric: str
    value: float
    best: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class ParamGroup:
    """Parameters, by name, that the optimiser treats alike."""

    name: str
    params: list[str]
    weight_decay: bool = True
    #: of optimisers that have one (lars, lamb); None: where there is weight decay
    trust_ratio: bool | None = None


def by_dimension(model: nn.Module) -> list[ParamGroup]:
    """Weights (two or more dimensions) apart from biases and norms, which take no weight decay by default."""
    named = dict(model.named_parameters())
    groups = [
        ParamGroup("weights", [name for name, p in named.items() if p.dim() > 1]),
        ParamGroup("biases and norms", [name for name, p in named.items() if p.dim() <= 1], weight_decay=False),
    ]
    return [group for group in groups if group.params]


@dataclass(frozen=True)
class Picture:
    """A PNG file that prediction wrote, with what it shows."""

    title: str
    path: Path
    caption: str = ""


@dataclass(frozen=True)
class Prediction:
    """What `predict` shows a person, in order."""

    pictures: list[Picture]
    tables: list[Table]


class Workload(Protocol):
    """The contract: about eight members, everything else is the system's.

    A workload whose data can be simulated also has `MakeSection` and a static `make(section)`, for `podium data make`.
    One whose model Hugging Face's libraries know also has, for `podium export` and `workload.init_from`:

        to_huggingface(model)                      (config.json as a mapping, tensors by their names there)
        from_huggingface(model, config, tensors)   copies the weights; UserError where they are another model's
        tokenizer_file()                           the `tokenizer.json` of its data, or None
    """

    #: schemas of `workload.model` and `workload.data`
    ModelSection: ClassVar[type[Section]]
    DataSection: ClassVar[type[Section]]
    #: what a good run of the default recipe reaches
    target: Target

    def build_model(self) -> nn.Module:
        """A plain single-device module; weights drawn from torch's default generator, which the caller seeds."""
        ...

    def source(self, split: Split) -> Source:
        """The samples of one split; opened on first use, raises UserError when they cannot be had."""
        ...

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the model's forward takes of a micro-batch, in evaluation."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Forward pass and loss of one micro-batch; metrics only when the model is in evaluation mode."""
        ...

    def param_groups(self, model: nn.Module) -> list["ParamGroup"]:
        """Parameters by treatment; `by_dimension` serves most workloads."""
        ...

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The ordered blocks a pipeline may cut between, with the names printed in the device allocation."""
        ...

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        """A batch of the right shapes and types, for shapes, FLOPs and compilation."""
        ...

    def predict(self, model: nn.Module, outputs: "Outputs", folder: Path) -> Prediction:
        """The pictures (written into `folder`) and tables a person wants after training."""
        ...


class Outputs(Protocol):
    """Runs the model over a split in evaluation mode; handed to `predict` so that no workload writes that loop."""

    def __call__(
        self, split: Split, max_samples: int | None = None, digest: Callable[[Any], Mapping[str, Tensor]] | None = None
    ) -> tuple[dict, dict]:
        """(inputs and targets, model outputs) as numpy arrays by name.

        A model's only output is under `"output"`; `digest` makes named tensors of what it returns for a micro-batch.
        """
        ...


def workload_class(name: str) -> type:
    """The `Workload` class registered under `name` (which must be in the table)."""
    module: type = importlib.import_module(WORKLOADS[name]).Workload
    return module
