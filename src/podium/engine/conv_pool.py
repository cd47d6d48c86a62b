"""A convolution, the max-pool after it and a ReLU as one operator. Used by `operators.py`.

Forward, a convolution and the pool take turns on a few samples at a time, whose values are still in the
processor's cache when the pool reads them. Backward, `pooled.py` leaves out what the pool has not let through.

    image (n, c, h, w), channels-last; kernel a × b
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from podium.engine import few_taps, winograd
from podium.engine.pooled import convolve_and_pool, geometry_of, gradients, pool

#: of the convolution's values that are to stay in the cache
_PIECE_BYTES = 3 << 20
#: Measured on AVX2: 1.2 to 1.4 times as fast as a library's products with windows of 2, 1.7 with 4, 2.1 with 8; 1.1 to
#: 1.3 times with weights of 2 MB, 1.5 and more with those that stay in the cache of a core.
_LEAST_AREA, _MOST_AREA = 2, 64
_MOST_WEIGHT_BYTES = 2 << 20


class ConvPool(torch.autograd.Function):
    """relu(max_pool(conv(image))), stride 1 and no padding, the pool's windows side by side."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[int, int], relu: bool
    ) -> Tensor:
        n, c, h, w = image.shape
        num_out, _, a, b = weight.shape
        geometry = geometry_of((h, w, c), (a, b), num_out, window, relu)
        result = winograd.channels_last_empty(n, num_out, *geometry.pooled)
        pooled = result.permute(0, 2, 3, 1)
        chosen = torch.empty(pooled.shape, dtype=torch.uint8)
        if geometry.small:
            taps, bias_of = weight.permute(0, 2, 3, 1), None if bias is None else bias.contiguous()
            convolve_and_pool(geometry, image.permute(0, 2, 3, 1).contiguous(), taps, bias_of, pooled, chosen)
        else:
            used = geometry.pooled[0] * window[0], geometry.pooled[1] * window[1], num_out
            num_samples = max(1, _PIECE_BYTES // (geometry.num_conv * image.element_size()))
            for start in range(0, n, num_samples):
                part = slice(start, start + num_samples)
                if winograd.fits(image, weight, (0, 0)):
                    rows = image[part].permute(0, 2, 3, 1)
                    conv = winograd.convolved(rows, weight, bias, winograd.Geometry((h, w, c), used, (0, 0)))
                else:
                    conv = torch.conv2d(image[part], weight, bias).permute(0, 2, 3, 1).contiguous()
                pool(geometry, conv, pooled[part], chosen[part])
        ctx.save_for_backward(image, weight, chosen)
        ctx.geometry, ctx.has_bias = geometry, bias is not None
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, weight, chosen = ctx.saved_tensors
        image, taps, grad = (tensor.permute(0, 2, 3, 1).contiguous() for tensor in (image, weight, grad))
        wants_image, of_image = ctx.needs_input_grad[0], None
        if not wants_image and few_taps.fits(ctx.geometry):
            of_taps, of_bias = few_taps.gradients(ctx.geometry, image, chosen, grad)
        else:
            of_image, of_taps, of_bias = gradients(ctx.geometry, image, taps, chosen, grad, wants_image)
        return (
            of_image.permute(0, 3, 1, 2) if of_image is not None else None,
            of_taps.permute(0, 3, 1, 2),
            of_bias if ctx.has_bias else None,
            None,
            None,
        )


def window_of(conv: nn.Conv1d | nn.Conv2d, pool: nn.MaxPool1d | nn.MaxPool2d) -> tuple[int, ...] | None:
    """The pool's window where `ConvPool` can do what the two modules do, and does it faster; else None."""
    dims = len(conv.kernel_size)
    window, stride, padding, dilation = (
        (value,) * dims if isinstance(value, int) else tuple(value)
        for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    zeros, ones = (0,) * dims, (1,) * dims
    plain_pool = window == stride and (padding, dilation) == (zeros, ones)
    plain_pool = plain_pool and not pool.ceil_mode and not pool.return_indices
    plain_conv = (conv.stride, conv.padding, conv.dilation, conv.groups) == (ones, zeros, ones, 1)
    worthwhile = _LEAST_AREA <= math.prod(window) <= _MOST_AREA
    worthwhile = worthwhile and conv.weight.numel() * conv.weight.element_size() <= _MOST_WEIGHT_BYTES
    return window if plain_pool and plain_conv and worthwhile else None
