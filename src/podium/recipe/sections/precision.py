"""The `precision` section: number formats of weights and arithmetic. `transforms/precision.py` applies it."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from podium.recipe.section import Section

Mode = Literal["32.32", "16.32", "16.16"]


class PrecisionSection(Section):
    """`precision`: number formats. `precision: 16.16` alone sets the mode."""

    #: bits of the arithmetic and of the weights
    mode: Mode = "32.32"
    #: bf16: eight bits of precision, the range of single precision; fp16: eleven bits, up to 65,504
    half: Literal["bf16", "fp16"] = "bf16"
    #: 16.16: round weights and optimiser state up or down at random, correct on average; null: on
    stochastic_rounding: bool | None = None
    #: factor on the loss in the backward pass, which keeps small gradients within fp16's range; divided out before
    #: the update. auto: grows until gradients overflow, in which case that update is skipped
    loss_scale: Annotated[float, Field(gt=0)] | Literal["auto"] = 1.0
    #: on accelerators that have it: products of single-precision numbers round their factors to ten bits (TF32)
    tf32: bool = False
    #: stop at the first value that is not finite, and name the layer; slow
    trap: bool = False

    @field_validator("mode", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Accept 16.16, which YAML reads as a number."""
        return f"{value:.2f}" if isinstance(value, float) else value

    @property
    def computes_in_half(self) -> bool:
        return self.mode != "32.32"

    @property
    def rounds_stochastically(self) -> bool:
        return self.mode == "16.16" and self.stochastic_rounding is not False
