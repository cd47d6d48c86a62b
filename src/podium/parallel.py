"""How one replica is spread over devices: owns the `parallel` section.

`topology.py` says which instance carries which stage; `podium topology` draws it; `staged.py` cuts the model.
"""

from typing import Any, Literal

from pydantic import PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from podium.engine.pipeline_order import Schedule
from podium.schema import Section


class ParallelSection(Section):
    """One replica over several devices: each holds a stage, and a pipeline runs through them."""

    #: devices that one replica spans, or the layers on each: [0, 4, 4, 4]
    stages: PositiveInt | tuple[int, ...] = 1
    #: in which order devices take micro-batches, to the same bits: interleaved (1F1B), grouped (GPipe) or one by one
    schedule: Schedule = "interleaved"
    #: keep only what goes in and out of the model's blocks and compute the rest again in the backward pass
    recompute: bool = False
    #: what instances share out between them. optimiser: each keeps the optimiser's state of some of the parameters and
    #: steps these; the bits stay. parameters: also weights and gradients, by rows (needs engine.reduction=fast)
    shard: Literal["none", "optimiser", "parameters"] = "none"

    @field_validator("stages", mode="before")
    @classmethod
    def _number_or_layers(cls, value: Any) -> Any:
        counts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            raise PydanticCustomError("stages", "the number of devices that one replica spans, or the layers on each")
        if not any(counts):
            raise PydanticCustomError("stages", "at least one stage with at least one layer")
        return tuple(value) if isinstance(value, list) else value

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers on each stage where the recipe says so, else nothing."""
        return () if isinstance(self.stages, int) else self.stages
