"""The `norm` section of a model; `norm.py` builds the layers. Does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from podium.recipe.section import Section


class NormSection(Section):
    """How a model normalises its features."""

    #: batch: over the samples of a micro-batch; group: over groups of channels, sample by sample; none: not at all
    kind: Literal["batch", "group", "none"] = "batch"
    #: batch: replicas whose micro-batches share their statistics; a power of two that divides `batch.replicas`
    span: PositiveInt = 1
    #: batch: share of the running statistics that an update keeps; null: the model's own, 0.9 (efficientnet: 0.99)
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    #: group: number of groups; must divide the number of channels
    groups: PositiveInt = 32

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited keys that apply only to batch norm."""
        return ("span", "decay") if written.get("kind") in ("group", "none") else ()

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if self.span > 1 and self.kind != "batch":
            raise ValueError(f"workload.model.norm.span = {self.span}: expected 1 with norm.kind = {self.kind}")
        if self.decay is not None and self.kind != "batch":
            raise ValueError(f"workload.model.norm.decay does not apply to norm.kind = {self.kind}: leave it out")
        if self.span & (self.span - 1):
            raise ValueError(f"workload.model.norm.span = {self.span}: expected a power of two")
        return self
