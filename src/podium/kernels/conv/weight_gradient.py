"""The gradient of a convolution's weight as one matrix product. Used by `conv/modules.py`.

n samples, c channels, h × w positions, k the kernel's area
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from podium.kernels.conv.memory import channels_last

#: A weight gradient as one matrix product needs the k · c inputs of every position side by side in memory; within these
#: bounds the copy costs less than it saves (30 to 90 channels, k = 4, 76,032 positions, one AVX2 core: 28 ms instead of
#: 60). With few outputs the product is too small to pay for it (36 to 12, 3 × 3, 32,768 positions, two cores: 17.9 ms
#: instead of 4.4). With AVX-512 the library is faster at all sizes (see `slower_with` in `registry.py`).
_LEAST_CHANNELS = 16
_LEAST_OUTPUTS = 64
_MOST_PATCH_BYTES = 64 << 20
#: The library's own kernels are made for whole vectors of channels, and better for those (32 to 32 channels, 3 × 3,
#: 32,768 positions, two cores: 7.0 ms instead of 13.5); with many channels only if no gradient of the weight is needed
#: (128 to 128 with stride 2, 6,272 positions: 42 ms, here 22; 512 to 512, 392 positions: 24, here 18).
_VECTOR, _MANY_CHANNELS = 8, 128


def fits(weight: Tensor, groups: int) -> bool:
    """Return whether the library's own method is slower."""
    num_out, c, *kernel = weight.shape
    if groups > 1 or c < _LEAST_CHANNELS:
        return False
    if kernel[0] * kernel[1] == 1:  # a matrix product without any copy
        return True
    return num_out >= _LEAST_OUTPUTS and (bool(num_out % _VECTOR or c % _VECTOR) or c >= _MANY_CHANNELS)


class ConvolutionWithGradient(torch.autograd.Function):
    """torch's convolution of channels-last images, with our own gradients of weight and bias.

    The library's gradients are slow for few channels on AVX2; as a matrix product they run at its full rate.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.geometry = stride, padding, dilation, groups
        return torch.conv2d(image, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        wants_image, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = channels_last(grad)
        rows = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])  # (n · h · w, out), no copy
        of_bias = rows.sum(0) if wants_bias else None
        of_weight = None
        if wants_weight and groups == 1 and set(dilation) == {1}:
            of_weight = _weight_gradient(image, weight, rows, grad.shape[2:], stride, padding)
        by_library = [wants_image, wants_weight and of_weight is None, False]
        of_image = None
        if any(by_library):
            of_image, weight_too, _ = torch.ops.aten.convolution_backward(
                grad, image, weight, None, stride, padding, dilation, False, [0, 0], groups, by_library
            )
            of_weight = weight_too if of_weight is None else of_weight
        return of_image, of_weight, of_bias, None, None, None, None


def _weight_gradient(
    image: Tensor, weight: Tensor, rows: Tensor, out_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """Compute one matrix product, (out, n·h·w) × (n·h·w, k·c); return None if the library's own method is better."""
    num_out, c, *kernel = weight.shape
    num_patch = kernel[0] * kernel[1] * c
    if c < _LEAST_CHANNELS or len(rows) * num_patch * rows.element_size() > _MOST_PATCH_BYTES:
        return None
    if any(padding):
        image = channels_last(F.pad(image, (padding[1], padding[1], padding[0], padding[0])))
    of_sample, _, of_row, of_column = image.stride()
    patches = image.as_strided(
        (len(image), *out_size, kernel[0], kernel[1] * c),
        (of_sample, of_row * stride[0], of_column * stride[1], of_row, 1),
    ).reshape(-1, num_patch)
    return (rows.t() @ patches).view(num_out, *kernel, c).permute(0, 3, 1, 2)
