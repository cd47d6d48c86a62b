"""Number formats of weights and arithmetic, and the loss scale, as set by the `precision` section.

    32.32   single precision throughout
    16.32   computes in half precision (torch's autocast) with weights, gradients and optimiser state in single
    16.16   weights, gradients and optimiser state in half precision; updates are computed in single precision and
            rounded stochastically (see `optim/stochastic_rounding.py`). Statistics of batch norm stay in single
            precision

Applied to a model from outside, like layouts: modules change class in place, checkpoints keep their names and shapes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.layers.norm import AnyBatchNorm
from podium.recipe.sections.precision import PrecisionSection

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_type(section: PrecisionSection) -> torch.dtype:
    """Return the half-precision type that the section names."""
    return _HALF[section.half]


def apply_precision(section: PrecisionSection, model: nn.Module) -> None:
    """Make the model compute as the section says; its caller passes and receives single precision."""
    if section.mode == "32.32":
        return
    if section.mode == "16.16":
        _to_half(model, half_type(section))
    base = _Autocast if section.mode == "16.32" else _Half
    model.__class__ = type(type(model).__name__, (base, type(model)), {"half_type": half_type(section)})


def _to_half(model: nn.Module, half: torch.dtype) -> None:
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.is_floating_point():
                param.data = param.data.to(half)
        if isinstance(module, AnyBatchNorm):
            single = (own for plain, own in _SINGLE_STATISTICS.items() if isinstance(module, plain))
            module.__class__ = next(single, type(module))  # type: ignore[assignment]
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(half))


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


# The same for a model whose blocks are called one by one: its inputs, the blocks, its outputs.


def cast_inputs(section: PrecisionSection, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert a model's inputs to the type that its first block needs."""
    return tuple(_converted(arg, half_type(section)) for arg in args) if section.mode == "16.16" else args


def autocast_blocks(section: PrecisionSection, device: torch.device) -> AbstractContextManager:
    """Return the context that the blocks run in."""
    if section.mode != "16.32":
        return nullcontext()
    return torch.autocast(device.type, dtype=half_type(section))


def cast_outputs(section: PrecisionSection, output: Any) -> Any:
    """Convert the last block's output to the type that the model's caller expects."""
    return output if section.mode == "32.32" else _converted(output, torch.float32)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors to `dtype`, also within tuples and mappings; leave everything else unchanged."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_converted(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {name: _converted(item, dtype) for name, item in value.items()}
    return value


def _normalised(layer: AnyBatchNorm, x: Tensor) -> Tensor:
    """Normalise half-precision values with running statistics that are kept in single precision."""
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
