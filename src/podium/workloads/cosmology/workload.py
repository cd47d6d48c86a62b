"""The cosmology U-Net: predicts the fields of the gas from those of dark matter. Implements the contract."""

from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from podium.contract import Batch, Loss, Outputs, ParamGroup, Prediction, Split, Target, by_dimension
from podium.data.source import Source
from podium.recipe.section import Section
from podium.workloads.cosmology.data import FIELDS, CosmologySamples
from podium.workloads.cosmology.make import make
from podium.workloads.cosmology.model import UNet, build_network
from podium.workloads.cosmology.scales import to_density
from podium.workloads.cosmology.section import CosmologyData, CosmologyMake, CosmologyModel


class Workload:
    """The cosmology workload; `podium.contract` documents its members."""

    ModelSection: ClassVar[type[Section]] = CosmologyModel
    DataSection: ClassVar[type[Section]] = CosmologyData
    MakeSection: ClassVar[type[Section]] = CosmologyMake
    target = Target("valid/loss", 0.006)

    def __init__(self, model: CosmologyModel, data: CosmologyData) -> None:
        self._model = model
        self._samples = CosmologySamples(data)

    @staticmethod
    def make(section: CosmologyMake) -> None:
        """Simulate boxes in the published layout."""
        make(section)

    def build_model(self) -> nn.Module:
        return build_network(self._model, self._samples.section.crop)

    def source(self, split: Split) -> Source:
        return self._samples.source(split)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["nbody"],)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the sum over samples of the mean |difference| over cells and channels, plus `lambda_rho` times the
        mean |difference| of densities over cells; the count is that of the samples."""
        # Always in single precision: bfloat16 is not precise enough for a sum over a crop.
        output, target = model(batch["nbody"]).float(), batch["hydro"]
        count = len(target)
        error = (output - target).abs()
        loss = error.sum() * (count / error.numel())
        if model.training:
            if self._model.lambda_rho:
                loss = loss + self._model.lambda_rho * _density_error(output, target)
            return Loss(loss, count)
        metrics = {}
        for name, channels in FIELDS.items():
            part = error[:, channels]
            metrics[f"{name}_l1"] = (part.sum() * (count / part.numel()), count)
        metrics["rho_l1"] = (_density_error(output, target), count)
        if self._model.lambda_rho:
            loss = loss + self._model.lambda_rho * metrics["rho_l1"][0]
        return Loss(loss, count, metrics)

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return by_dimension(model)

    def stages(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return cast(UNet, model).stages()

    def example(self, num_samples: int = 2) -> dict[str, Tensor]:
        return {name: torch.zeros(num_samples, *field.shape) for name, field in self._samples.fields.items()}

    def predict(self, model: nn.Module, outputs: Outputs, folder: Path) -> Prediction:
        from podium.workloads.cosmology import predict  # draws with matplotlib, which is slow to import

        given, got = outputs("test", predict.max_samples(self._samples.section.crop))
        return predict.predict(
            given["nbody"],
            given["hydro"],
            got["output"],
            folder,
            lambda_rho=self._model.lambda_rho,
            cell_mpc=self._samples.cell_mpc("test"),
        )


def _density_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean |difference| over cells of the gas density in units of its mean, summed over samples."""
    error = (to_density(output[:, 0]) - to_density(target[:, 0])).abs()
    return error.sum() * (len(error) / error.numel())
