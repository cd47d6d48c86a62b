"""Batch sizes: owns the `batch` section. What is missing is derived, what contradicts is an error."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from podium.schema import Section


class BatchSection(Section):
    """Give any of the four; global = micro × accumulation × replicas holds in the end.

    With `scaling: strong`, `micro` is what one replica alone would take: it is divided between the replicas, so the
    global batch stays the same as replicas grow. With `weak`, every replica takes `micro`.
    """

    micro: PositiveInt | None = None
    accumulation: PositiveInt | None = None
    replicas: PositiveInt | None = None
    global_: PositiveInt | None = Field(default=None, alias="global")
    scaling: Literal["weak", "strong"] = "weak"
    #: global: one order of all samples; shard: samples divided evenly between replicas, shuffled within each
    shuffle: Literal["global", "shard"] = "global"

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        micro, accumulation, replicas, total = self.micro, self.accumulation, self.replicas, self.global_
        share = 1 if self.scaling == "strong" else None  # strong: replicas divide the batch instead of multiplying it
        if total is None:
            if micro is None:
                raise ValueError("give batch.micro or batch.global")
            accumulation, replicas = accumulation or 1, replicas or 1
            total = micro * accumulation * (share or replicas)
        elif micro is None:
            accumulation, replicas = accumulation or 1, replicas or 1
            micro = _quotient(total, accumulation * (share or replicas), "global", "accumulation × replicas")
        elif accumulation is None:
            replicas = replicas or 1
            accumulation = _quotient(total, micro * (share or replicas), "global", "micro × replicas")
        elif replicas is None:
            replicas = 1 if share else _quotient(total, micro * accumulation, "global", "micro × accumulation")
        if total != micro * accumulation * (share or replicas):
            raise ValueError(
                f"batch.global = {total} contradicts micro × accumulation × replicas = "
                f"{micro} × {accumulation} × {share or replicas} = {micro * accumulation * (share or replicas)}"
            )
        if share and micro % replicas:
            raise ValueError(f"strong scaling cannot divide batch.micro = {micro} between {replicas} replicas")
        for name, value in (("micro", micro), ("accumulation", accumulation), ("replicas", replicas)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "global_", total)
        return self

    # The section is complete once validated; these say so to readers and to the type checker.
    @property
    def micro_batch(self) -> int:
        """Samples in one forward and backward pass of one replica."""
        assert self.micro
        assert self.replicas
        return self.micro // self.replicas if self.scaling == "strong" else self.micro

    @property
    def num_accumulation(self) -> int:
        assert self.accumulation
        return self.accumulation

    @property
    def num_replicas(self) -> int:
        assert self.replicas
        return self.replicas

    @property
    def global_batch(self) -> int:
        """Samples in one update."""
        return self.micro_batch * self.num_accumulation * self.num_replicas


def _quotient(total: int, part: int, total_name: str, part_name: str) -> int:
    if total % part:
        raise ValueError(f"batch.{total_name} = {total} is not a multiple of {part_name} = {part}")
    return total // part
