"""The neuron inverter: predicts the parameters of a neuron from its voltages. Implements the contract."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.source import Source
from podium.recipe.section import Section
from podium.workloads.neuron.data import NeuronSamples, simulate_shown
from podium.workloads.neuron.model import build_network
from podium.workloads.neuron.section import NeuronData, NeuronMake, NeuronModel


class Workload:
    """The neuron workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = NeuronModel
    DataSection: ClassVar[type[Section]] = NeuronData
    MakeSection: ClassVar[type[Section]] = NeuronMake
    fixed: ClassVar[bool] = True
    target = Target("valid/loss", 0.20)

    def __init__(self, model: NeuronModel, data: NeuronData) -> None:
        self._model = model
        self._samples = NeuronSamples(data)

    @staticmethod
    def make(section: NeuronMake) -> None:
        """Simulate a data set in the published layout."""
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
        # Always in single precision: bfloat16 is not precise enough for a sum over a micro-batch.
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
        from podium.workloads.neuron import predict  # draws with matplotlib, which is slow to import

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
