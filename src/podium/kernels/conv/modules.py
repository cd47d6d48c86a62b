"""Convolutions and pools on channels-last values; `kernels/install.py` applies them to models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.kernels import registry
from podium.kernels.conv import pointwise
from podium.kernels.conv.memory import channels_innermost, channels_last
from podium.kernels.eligibility import leave_to_torch


def install(module: nn.Module) -> None:
    """Change a plain convolution or pool to one of the classes below."""
    faster = _FASTER.get(type(module))
    if faster is not None:
        module.__class__ = faster
    if isinstance(module, nn.Conv1d | nn.Conv2d) and faster is not None:
        module.weight.data = channels_innermost(module.weight.data)


def convolved(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve channels-last images as torch does, by the kernel that fits."""
    image = channels_last(image)
    if leave_to_torch(image):
        return torch.conv2d(image, weight, bias, stride, padding, dilation, groups)
    plain, winograd = groups == 1 and set(stride) == set(dilation) == {1}, registry.find("winograd")
    if plain and winograd is not None and winograd.fits(image, weight, padding):
        result: Tensor = winograd.WinogradConvolution.apply(image, weight, bias, tuple(padding))
    elif plain and pointwise.fits(image, weight, padding):
        result = pointwise.PointwiseConvolution.apply(image, weight, bias)
    else:
        result = torch.conv2d(image, weight, bias, stride, padding, dilation, groups)
    return result


class Conv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or input.dim() != 4:
            return super().forward(input)
        return convolved(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv1d(nn.Conv1d):
    """A convolution computed as a 2-D one of height 1: twice as fast, as only these have channels-last kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or input.dim() != 3:
            return super().forward(input)
        image, weight = input.unsqueeze(2), self.weight.unsqueeze(2)
        return convolved(
            image, weight, self.bias, (1, *self.stride), (0, *self.padding), (1, *self.dilation), self.groups
        ).squeeze(2)


class MaxPool1d(nn.MaxPool1d):
    def forward(self, input: Tensor) -> Any:
        if self.return_indices or input.dim() != 3:
            return super().forward(input)
        (size,), (stride,), (padding,), (dilation,) = map(
            _single, (self.kernel_size, self.stride, self.padding, self.dilation)
        )
        pooled = F.max_pool2d(input.unsqueeze(2), (1, size), (1, stride), (0, padding), (1, dilation), self.ceil_mode)
        return pooled.squeeze(2)


def _single(value: int | tuple[int, ...]) -> tuple[int]:
    return (value,) if isinstance(value, int) else (value[0],)


_FASTER: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: Conv1d, nn.Conv2d: Conv2d, nn.MaxPool1d: MaxPool1d}
