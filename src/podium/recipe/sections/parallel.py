"""The `parallel` section: how one replica is distributed over devices.

`topology.py` says which instance carries which stage; `podium topology` draws it; `distributed/pipeline/stage_model.py`
cuts the model.
"""

from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from podium.recipe.section import Section

#: see `distributed/pipeline/schedule.py`
Schedule = Literal["interleaved", "grouped", "sequential"]


class ParallelSection(Section):
    """How one replica spans several devices: each holds one stage of a pipeline."""

    #: the number of devices that one replica spans, or the layers on each: [0, 4, 4, 4]
    stages: PositiveInt | tuple[int, ...] = 1
    #: order in which devices process micro-batches, with the same bits: interleaved (1F1B), grouped (GPipe), one by one
    schedule: Schedule = "interleaved"
    #: keep only the inputs and outputs of the model's blocks and recompute the rest in the backward pass
    recompute: bool = False
    #: what is sharded over the instances. optimiser: each keeps the optimiser state of some of the parameters and
    #: updates these; same bits. parameters: also weights and gradients, by rows (needs engine.reduction=fast)
    shard: Literal["none", "optimiser", "parameters"] = "none"

    @field_validator("stages", mode="before")
    @classmethod
    def _number_or_layers(cls, value: Any) -> Any:
        counts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            raise ValueError("expected the number of devices that one replica spans, or the layers on each")
        if not any(counts):
            raise ValueError("expected at least one stage with at least one layer")
        return tuple(value) if isinstance(value, list) else value

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Return the layers on each stage if the recipe gives them, otherwise nothing."""
        return () if isinstance(self.stages, int) else self.stages
