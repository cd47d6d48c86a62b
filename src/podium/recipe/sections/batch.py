"""The `batch` section: batch sizes. Missing ones are derived, contradictions are errors."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from podium.recipe.section import Section

_SIZES = ("global", "accumulation", "micro", "replicas")
#: inherited sizes to drop: the smallest set first; replicas last, as they determine how a training is distributed
_DROP_ORDER = sorted(
    (keys for count in (1, 2, 3) for keys in combinations(_SIZES, count)), key=lambda keys: "replicas" in keys
)


class BatchSection(Section):
    """Batch sizes: give any of the four; the others follow from global = micro × accumulation × replicas.

    With `scaling: strong`, `micro` is the micro-batch of a single replica: it is divided between the replicas, so that
    the global batch stays the same as replicas are added. With `weak`, every replica takes `micro`.
    """

    micro: PositiveInt | None = None
    accumulation: PositiveInt | None = None
    replicas: PositiveInt | None = None
    global_: PositiveInt | None = Field(default=None, alias="global")
    scaling: Literal["weak", "strong"] = "weak"
    #: global: one order of all samples; shard: samples divided evenly between replicas, shuffled within each;
    #: length: as global, with samples of like length in each micro-batch
    shuffle: Literal["global", "shard", "length"] = "global"

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the inherited sizes that contradict those written later, in the order of `_DROP_ORDER`."""
        both = {**inherited, **written}
        if all(written.get(key) is None for key in _SIZES) or cls._holds(both):
            return ()
        below = {key for key in _SIZES if inherited.get(key) is not None and key not in written}
        fitting = (keys for keys in _DROP_ORDER if below.issuperset(keys))
        return next((keys for keys in fitting if cls._holds({**both, **dict.fromkeys(keys)})), ())

    @classmethod
    def _holds(cls, sizes: Mapping[str, Any]) -> bool:
        try:
            cls.model_validate(sizes, strict=True)
        except ValidationError:
            return False
        return True

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        micro, accumulation, replicas, total = self.micro, self.accumulation, self.replicas, self.global_
        share = 1 if self.scaling == "strong" else None  # strong: replicas divide the batch instead of multiplying it
        if total is None:
            if micro is None:
                raise ValueError("batch.micro is missing: give it or batch.global")
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
                f"batch.global = {total}: expected micro × accumulation × replicas = "
                f"{micro} × {accumulation} × {share or replicas} = {micro * accumulation * (share or replicas)}"
            )
        if share and micro % replicas:
            raise ValueError(
                f"batch.micro = {micro}: expected a multiple of batch.replicas = {replicas} with batch.scaling = strong"
            )
        for name, value in (("micro", micro), ("accumulation", accumulation), ("replicas", replicas)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "global_", total)
        return self

    # The section is complete once validated; these properties tell readers and the type checker.
    @property
    def micro_batch(self) -> int:
        """Return the samples in one forward and backward pass of one replica."""
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
        """Return the samples in one update."""
        return self.micro_batch * self.num_accumulation * self.num_replicas


def _quotient(total: int, part: int, total_name: str, part_name: str) -> int:
    if total % part:
        raise ValueError(f"batch.{total_name} = {total}: expected a multiple of {part_name} = {part}")
    return total // part
