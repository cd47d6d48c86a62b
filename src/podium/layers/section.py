"""The `norm` section of a model; `norm.py` builds the layers. Does not import torch."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from podium.recipe.section import Section


class NormSection(Section):
    """How a model normalises its features."""

    #: batch: over the samples of a micro-batch; group: over groups of channels, sample by sample; none: not at all
    kind: Literal["batch", "group", "none"] = "batch"
    #: batch: replicas whose micro-batches share their statistics; a power of two that divides `batch.replicas`
    span: PositiveInt = 1
    #: group: number of groups; must divide the number of channels
    groups: PositiveInt = 32

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if self.span > 1 and self.kind != "batch":
            raise ValueError(f"workload.model.norm.span = {self.span}: expected 1 with norm.kind = {self.kind}")
        if self.span & (self.span - 1):
            raise ValueError(f"workload.model.norm.span = {self.span}: expected a power of two")
        return self
