"""Number formats of weights and arithmetic, and the scale of the loss. Owns the `precision` section.

    32.32   single precision throughout
    16.32   computes in half precision (torch's autocast) with weights, gradients and optimiser state in single
    16.16   weights, gradients and optimiser state in half precision; updates are computed in single precision and
            rounded stochastically (see `optim/rounding.py`). Statistics of batch norm stay in single precision

Put on a model from outside, like layouts: modules change class in place, checkpoints keep their names and shapes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from podium.schema import Section

Mode = Literal["32.32", "16.32", "16.16"]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: the automatic scale of the loss: where it begins, how it grows, and what an overflow costs
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWS_AFTER = 2.0**16, 2.0, 0.5, 2000
_LEAST_SCALE, _MOST_SCALE = 2.0**-14, 2.0**32


class PrecisionSection(Section):
    """`precision: 16.16` alone says the mode."""

    #: bits of the arithmetic and of the weights
    mode: Mode = "32.32"
    #: bf16: eight bits of precision, the range of single precision; fp16: eleven bits, up to 65,504
    half: Literal["bf16", "fp16"] = "bf16"
    #: 16.16: round weights and optimiser state up or down by chance, right on average; null: on
    stochastic_rounding: bool | None = None
    #: factor on the loss in the backward pass, which keeps small gradients within fp16's range; taken out again before
    #: the update. auto: grows until gradients overflow, which costs that update
    loss_scale: Annotated[float, Field(gt=0)] | Literal["auto"] = 1.0
    #: stop at the first value that is not finite, and name the layer; slow
    trap: bool = False

    @field_validator("mode", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """YAML takes 16.16 for a number."""
        return f"{value:.2f}" if isinstance(value, float) else value

    @property
    def half_type(self) -> torch.dtype:
        return _HALF[self.half]

    @property
    def rounds_stochastically(self) -> bool:
        return self.mode == "16.16" and self.stochastic_rounding is not False


def apply_precision(section: PrecisionSection, model: nn.Module) -> None:
    """Whoever calls the model gives and gets single precision; in between it is as the section says."""
    if section.mode == "32.32":
        return
    if section.mode == "16.16":
        _to_half(model, section.half_type)
    base = _Autocast if section.mode == "16.32" else _Half
    model.__class__ = type(type(model).__name__, (base, type(model)), {"half_type": section.half_type})


def _to_half(model: nn.Module, half: torch.dtype) -> None:
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.is_floating_point():
                param.data = param.data.to(half)
        if isinstance(module, _BatchNorm):
            module.__class__ = _SINGLE_STATISTICS.get(type(module), type(module))  # type: ignore[assignment]
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(half)


class _Autocast(nn.Module):
    half_type: torch.dtype

    def forward(self, *args: Any) -> Any:
        device = next(self.parameters()).device
        with torch.autocast(device.type, dtype=self.half_type):
            output = super().forward(*args)
        return _converted(output, torch.float32)


class _Half(nn.Module):
    half_type: torch.dtype

    def forward(self, *args: Any) -> Any:
        return _converted(super().forward(*(_converted(arg, self.half_type) for arg in args)), torch.float32)


# The same for a model whose blocks are called one by one: what goes in, around each, what comes out.


def given(section: PrecisionSection, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What whoever calls the model gives, as its first block takes it."""
    return tuple(_converted(arg, section.half_type) for arg in args) if section.mode == "16.16" else args


def computing(section: PrecisionSection, device: torch.device) -> AbstractContextManager:
    """Around the blocks."""
    if section.mode != "16.32":
        return nullcontext()
    return torch.autocast(device.type, dtype=section.half_type)


def returned(section: PrecisionSection, output: Any) -> Any:
    """What the last block returns, as whoever calls the model gets it."""
    return output if section.mode == "32.32" else _converted(output, torch.float32)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `dtype`, also within tuples and mappings; all else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_converted(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {name: _converted(item, dtype) for name, item in value.items()}
    return value


def _normalised(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm of half-precision values whose running statistics are kept in single precision."""
    assert layer.momentum is not None
    assert layer.num_batches_tracked is not None
    if layer.training:
        layer.num_batches_tracked.add_(1)
    return F.batch_norm(
        x,
        layer.running_mean,
        layer.running_var,
        layer.weight.float(),
        layer.bias.float(),
        layer.training,
        layer.momentum,
        layer.eps,
    )


class _BatchNorm1d(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return _normalised(self, input)


class _BatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return _normalised(self, input)


class _BatchNorm3d(nn.BatchNorm3d):
    def forward(self, input: Tensor) -> Tensor:
        return _normalised(self, input)


_SINGLE_STATISTICS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _BatchNorm1d,
    nn.BatchNorm2d: _BatchNorm2d,
    nn.BatchNorm3d: _BatchNorm3d,
}


class LossScale:
    """The factor on the loss. Automatic ones look at the gradients of every update, the same on every instance."""

    def __init__(self, setting: float | Literal["auto"]) -> None:
        self.automatic = setting == "auto"
        self.value = _FIRST_SCALE if setting == "auto" else float(setting)
        self.num_skipped = 0
        self._num_good = 0

    def accepts(self, norms: Tensor) -> bool:
        """Whether an update may be made with gradients of these norms; else they have overflowed and the next ones are
        scaled less."""
        if not self.automatic:
            return True
        # The host waits for the device here: which update comes next depends on it.
        if bool(norms.isfinite().all()):
            self._num_good += 1
            if self._num_good % _GROWS_AFTER == 0:
                self.value = min(self.value * _GROWTH, _MOST_SCALE)
            return True
        self._num_good = 0
        self.num_skipped += 1
        self.value = max(self.value * _BACKOFF, _LEAST_SCALE)
        return False

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        if self.automatic:
            self.value = float(state["value"])
            self._num_good, self.num_skipped = int(state["num_good"]), int(state["num_skipped"])
