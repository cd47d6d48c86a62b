"""The `engine` section: how `engine/update.py` runs updates on the machine."""

import difflib
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from podium.recipe.section import Section

#: rows of the table in `kernels/registry.py`
KernelName = Literal[
    "attention",
    "batch_norm",
    "conv3d_stride2",
    "conv3d_weight_copy",
    "conv_pool",
    "cross_entropy",
    "dropout_gelu",
    "few_rows",
    "jpeg_window",
    "mirror_normalise",
    "products",
    "vocabulary",
    "winograd",
]


class EngineSection(Section):
    """How updates run on the machine; none of these keys changes what is learnt."""

    #: updates between two times that the host reads the losses
    updates_per_call: PositiveInt = 50
    #: threads per replica; part of the numerics. `auto` is cores // replicas, at least 1
    threads: PositiveInt | Literal["auto"] = "auto"
    #: blocks of samples prepared in advance
    prefetch: NonNegativeInt = 2
    device: str = "auto"
    #: exact: the same bits on any number of instances; fast: torch's DistributedDataParallel
    reduction: Literal["exact", "fast"] = "exact"
    #: memory layout of convolutions; part of the numerics. `auto` is channels_last on a CPU, and on CUDA
    #: with half-precision arithmetic, else default
    layout: Literal["auto", "default", "channels_last"] = "auto"
    #: Podium's own kernels; auto: all that apply and are faster; off: torch's only; or a list. Part of the numerics
    kernels: Literal["auto", "off"] | tuple[KernelName, ...] = "auto"
    #: compile the whole model with torch.compile; part of the numerics
    compile: bool = False
    #: on CUDA devices: capture both passes of a micro-batch once and replay them, for small models without dropout
    graph: bool = False
    #: choices measured by `podium tune`: use the stored ones, or measure first if there are none
    tune: Literal["off", "remembered", "measure"] = "remembered"
    #: also use choices that change the bits of the result
    tune_bits: bool = False
    #: share of updates in which another instance computes one replica's gradients again, to compare them to the bit
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    #: a training that needs more memory than this host has: refuse it, only warn, or do not estimate
    memory_check: Literal["error", "warn", "off"] = "error"

    @field_validator("kernels", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value in ("auto", "off"):
            return value
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected auto, off or a list of names such as [{', '.join(get_args(KernelName)[:2])}]")
        for name in value:
            if name not in get_args(KernelName):
                near = difflib.get_close_matches(str(name), get_args(KernelName), 1)
                known = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(get_args(KernelName))}"
                raise ValueError(f"there is no kernel {name!r}: {known}")
        return tuple(value)
