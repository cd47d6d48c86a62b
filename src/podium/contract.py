"""The contract between Podium and what it trains.

A workload is one folder and one line in the table of `workloads/registry.py`. Its module `workload.py` has a class
`Workload` that is built from the two recipe sections defined in its `section.py`. It imports `data`, `layers` and this
module, never the engine or the training loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from podium.data.source import Source
from podium.recipe.section import Section
from podium.ui.table import Table

Split = Literal["train", "valid", "test"]
Batch = Mapping[str, Tensor]


@dataclass
class Loss:
    """The loss and metrics of one micro-batch: sums with their counts, divided once at the very end.

    `sum` carries the gradient; counts are known to the host, so nothing waits for the device.
    """

    sum: Tensor
    count: int
    metrics: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The goal of a good run: `metric` at most (or at least) `value`."""

    metric: str
    value: float
    best: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class ParamGroup:
    """Parameters, by name, that the optimiser treats the same way."""

    name: str
    params: list[str]
    weight_decay: bool = True
    #: for optimisers that have one (lars, lamb); None: wherever there is weight decay
    trust_ratio: bool | None = None


def by_dimension(model: nn.Module) -> list[ParamGroup]:
    """Separate weights (two or more dimensions) from biases and norms, which have no weight decay by default."""
    named = dict(model.named_parameters())
    groups = [
        ParamGroup("weights", [name for name, p in named.items() if p.dim() > 1]),
        ParamGroup("biases and norms", [name for name, p in named.items() if p.dim() <= 1], weight_decay=False),
    ]
    return [group for group in groups if group.params]


@dataclass(frozen=True)
class Picture:
    """A PNG file written by `predict`, with its title and caption."""

    title: str
    path: Path
    caption: str = ""


@dataclass(frozen=True)
class Prediction:
    """The pictures and tables returned by `predict`, in the order in which they are shown."""

    pictures: list[Picture]
    tables: list[Table]


def named_outputs(output: Any) -> Mapping[str, Tensor]:
    """Return the tensors that a model returned, by name."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items() if isinstance(value, Tensor) and value.dim()}
    return {f"output{place}": value for place, value in enumerate(output) if isinstance(value, Tensor) and value.dim()}


class Workload(Protocol):
    """The contract: about eight members; Podium provides everything else.

    A workload whose data can be simulated also has `MakeSection` and a static `make(section)`, for `podium data make`.
    One whose model exists in Hugging Face's libraries also has, for `podium export` and `workload.init_from`:

        to_huggingface(model)                      (config.json as a mapping, tensors by their names there)
        from_huggingface(model, config, tensors)   copies the weights; UserError if they belong to another model
        tokenizer_file()                           the `tokenizer.json` of its data, or None

    One whose loss in training depends on nothing but its parameters, buffers, samples and torch's generator, and whose
    model keeps nothing else from one pass to the next, may say so by `fixed = True`: small ones are then recorded and
    replayed (`engine/replay.py`), in half the time.
    """

    #: schemas of `workload.model` and `workload.data`
    ModelSection: ClassVar[type[Section]]
    DataSection: ClassVar[type[Section]]
    #: what a good run of the default recipe reaches
    target: Target | None

    def build_model(self) -> nn.Module:
        """Build a plain single-device module; its weights come from torch's default generator, seeded by the caller."""
        ...

    def source(self, split: Split) -> Source:
        """Return the samples of one split, opened on first use; raise UserError when they are not available."""
        ...

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the part of a micro-batch that the model's forward takes in evaluation."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward pass and return the loss of one micro-batch; metrics only in evaluation mode."""
        ...

    def param_groups(self, model: nn.Module) -> list["ParamGroup"]:
        """Return the parameters in groups that are treated the same way; `by_dimension` suits most workloads."""
        ...

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the ordered blocks between which a pipeline may split, by the names the device allocation shows."""
        ...

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        """Return a batch of the right shapes and types, used to find shapes, count FLOPs and compile."""
        ...

    def predict(self, model: nn.Module, outputs: "Outputs", folder: Path) -> Prediction:
        """Return the pictures (written to `folder`) and tables to look at after training."""
        ...


class Outputs(Protocol):
    """A function that runs the model over a split in evaluation mode, so that no workload has to write that loop."""

    def __call__(
        self, split: Split, max_samples: int | None = None, digest: Callable[[Any], Mapping[str, Tensor]] | None = None
    ) -> tuple[dict, dict]:
        """Return (inputs and targets, model outputs) as numpy arrays by name.

        A single output is named `"output"`; `digest` turns what the model returns for a micro-batch into named tensors.
        """
        ...
