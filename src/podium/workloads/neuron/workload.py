"""The neuron inverter: from the voltages of a neuron, the parameters that made it. The contract, tied together."""

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from podium.data.arrays import Source
from podium.schema import Section
from podium.workloads.base import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.workloads.neuron.data import NeuronData, NeuronSamples, simulate_shown
from podium.workloads.neuron.model import NeuronModel, build_network


class NeuronMake(Section):
    """What `podium data make neuron` takes: cells to simulate, and the folder for the files."""

    samples: PositiveInt
    out: Path
    seed: NonNegativeInt = 1
    cell: str = "simulated"
    dtype: Literal["float16", "float32"] = "float16"
    valid: PositiveInt | None = None
    test: PositiveInt | None = None


class Workload:
    """The contract of `podium.workloads.base` for neuron."""

    ModelSection: ClassVar[type[Section]] = NeuronModel
    DataSection: ClassVar[type[Section]] = NeuronData
    MakeSection: ClassVar[type[Section]] = NeuronMake
    target = Target("valid/loss", 0.20)

    def __init__(self, model: NeuronModel, data: NeuronData) -> None:
        self._model = model
        self._samples = NeuronSamples(data)

    @staticmethod
    def make(section: NeuronMake) -> None:
        """Simulates a data set in the published layout."""
        options = section.model_dump(exclude={"samples", "out"})
        simulate_shown(section.out, section.samples, **options)

    def build_model(self) -> nn.Module:
        num_bins, num_probes = self._samples.frame_shape
        statistics = self._samples.statistics() if self._model.standardise else None
        return build_network(self._model, num_bins, num_probes, len(self._samples.parameter_names), statistics)

    def source(self, split: Split) -> Source:
        return self._samples.source(split)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["frames"],)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        # In single precision whatever the model computes in: a sum over a micro-batch leaves bfloat16's reach.
        error = model(batch["frames"]).float() - batch["target"]
        count, num_parameters = error.shape
        loss = error.square().sum() / num_parameters
        if model.training:
            return Loss(loss, count)
        return Loss(loss, count, {"mae": (error.abs().sum() / num_parameters, count)})

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return list(model.named_children())

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        return {
            "frames": torch.zeros(num_samples, *self._samples.frame_shape),
            "target": torch.zeros(num_samples, len(self._samples.parameter_names)),
        }

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads.neuron import predict  # draws with matplotlib, which takes long to import

        given, got = outputs("test", predict.MAX_SAMPLES)
        samples = self._samples
        return predict.predict(
            given["frames"],
            given["target"],
            got["output"],
            samples.parameter_names,
            samples.probe_names,
            folder,
            volts=samples.layout.volts if samples.layout else None,
            resimulate=samples.resimulate if samples.section.source == "simulated" else None,
        )
