"""Stochastic rounding to half precision: correct on average, whereas rounding to the nearest would lose every update
smaller than half the distance between neighbouring numbers.

The random numbers depend only on (seed, update, name of the tensor), so it does not matter which instance rounds or
which tensors it holds. torchao's version is not used: it is tied to its own optimisers, whose steps take 15 to 50 times
as long as fused ones on a CPU.
"""

import torch
from torch import Tensor

from podium.machine import counter_rng

_DROPPED_BITS = 16  # of a float32, to make it a bfloat16
_FP16_LEAST_EXPONENT, _FP16_BITS, _FP16_MOST = -14, 10, 65504.0


class StochasticRounding:
    """The random numbers of one training; `begin` an update, then round in any order."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._update = 0

    def begin(self, update: int) -> None:
        self._update = update

    def into(self, target: Tensor, value: Tensor, name: str) -> None:
        """Round `value` (float32) to the target's type and store it there; `name` identifies the tensor."""
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device)
        generator.manual_seed(counter_rng.key("rounding", self._seed, self._update, name) >> 1)
        target.copy_(rounded(value, target.dtype, generator))


def rounded(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round `value` (float32) to bfloat16 or float16, to one of the two neighbours with the probabilities that make it
    correct on average. Values that are not finite stay as they are."""
    assert value.dtype == torch.float32
    return _rounded_bf16(value, generator) if dtype == torch.bfloat16 else _rounded_fp16(value, generator)


def _rounded_bf16(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round to bfloat16: the dropped bits, as a number, are the distance to the neighbour towards zero; adding random
    bits to them carries over with exactly that probability."""
    bits = value.view(torch.int32)
    noise = torch.randint_like(bits, 1 << _DROPPED_BITS, generator=generator)
    moved = noise.add_(bits).bitwise_and_(-(1 << _DROPPED_BITS)).view(torch.float32)
    return torch.where(value.isfinite(), moved, value).to(torch.bfloat16)


def _rounded_fp16(value: Tensor, generator: torch.Generator) -> Tensor:
    exponent = torch.frexp(value).exponent - 1
    exponent = exponent.clamp_(min=_FP16_LEAST_EXPONENT) - _FP16_BITS
    steps = torch.ldexp(value, -exponent)  # in units of the distance between neighbours; a power of two: exact
    chance = torch.empty_like(steps).uniform_(generator=generator)
    moved = torch.ldexp((steps + chance).floor_(), exponent).clamp_(-_FP16_MOST, _FP16_MOST)
    return torch.where(value.isfinite(), moved, value).to(torch.float16)
