"""A convolution, the max-pool after it and a ReLU as one operator. Used by `kernels/fusing.py`.

In the forward pass, convolution and pool alternate over a few samples at a time, whose values are still in the
processor's cache when the pool reads them. In the backward pass, `conv_pool_loops.py` skips the values that the pool
did not select.

    image (n, c, h, w), channels-last; kernel a × b
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.kernels import registry
from podium.kernels.conv import conv_pool_grad_dense
from podium.kernels.conv.conv_pool_loops import convolve_and_pool, geometry_of, gradients, pool
from podium.kernels.conv.memory import channels_last, channels_last_empty
from podium.kernels.conv.modules import Conv1d, Conv2d
from podium.kernels.eligibility import has_hooks, shown

#: bytes of the convolution's output that should stay in the cache
PIECE_BYTES = 3 << 20
#: Measured on AVX2: 1.2 to 1.4 times as fast as a library's products with windows of 2, 1.7 with 4, 2.1 with 8; 1.1 to
#: 1.3 times with weights of 2 MB, 1.5 and more with weights that stay in a core's cache.
_LEAST_AREA, _MOST_AREA = 2, 64
_MOST_WEIGHT_BYTES = 2 << 20


class ConvPool(torch.autograd.Function):
    """relu(max_pool(conv(image))) with stride 1, no padding, and pool windows that do not overlap."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[int, int], relu: bool
    ) -> Tensor:
        n, c, h, w = image.shape
        num_out, _, a, b = weight.shape
        geometry = geometry_of((h, w, c), (a, b), num_out, window, relu)
        result = channels_last_empty(n, num_out, *geometry.pooled)
        pooled = result.permute(0, 2, 3, 1)
        chosen = torch.empty(pooled.shape, dtype=torch.uint8)
        if geometry.small:
            taps, bias_of = weight.permute(0, 2, 3, 1), None if bias is None else bias.contiguous()
            convolve_and_pool(geometry, image.permute(0, 2, 3, 1).contiguous(), taps, bias_of, pooled, chosen)
        else:
            used = geometry.pooled[0] * window[0], geometry.pooled[1] * window[1], num_out
            num_samples = max(1, PIECE_BYTES // (geometry.num_conv * image.element_size()))
            winograd = registry.find("winograd")
            tiled = winograd is not None and winograd.fits(image, weight, (0, 0))
            for start in range(0, n, num_samples):
                part = slice(start, start + num_samples)
                if tiled:
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
        if not wants_image and conv_pool_grad_dense.fits(ctx.geometry):
            of_taps, of_bias = conv_pool_grad_dense.gradients(ctx.geometry, image, chosen, grad)
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
    """Return the pool's window if `ConvPool` can replace the two modules and is faster; otherwise None."""
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


class Step:
    """A convolution, its pool and perhaps a ReLU."""

    def __init__(self, conv: Conv1d | Conv2d, pool: nn.Module, relu: nn.ReLU | None, window: tuple[int, ...]) -> None:
        self._conv, self._relu, self._window = conv, relu is not None, window
        self._modules = (conv, pool) if relu is None else (conv, pool, relu)
        self.num_modules = len(self._modules)

    def __call__(self, input: Tensor) -> Tensor:
        conv = self._conv
        sizes = zip(input.shape[2:], conv.kernel_size, self._window, strict=False)
        fits = input.dim() == 2 + len(self._window) and all(size - k + 1 >= p for size, k, p in sizes)
        if not fits or any(has_hooks(module) for module in self._modules):
            for module in self._modules:
                input = module(input)
            return input
        if len(self._window) == 2:
            return self._run(input, conv.weight, self._window)
        return self._run(input.unsqueeze(2), conv.weight.unsqueeze(2), (1, *self._window)).squeeze(2)

    def _run(self, image: Tensor, weight: Tensor, window: tuple[int, ...]) -> Tensor:
        result: Tensor = ConvPool.apply(channels_last(image), weight, self._conv.bias, window, self._relu)
        return shown(self._modules, result)


def step(modules: Sequence[nn.Module]) -> Step | None:
    """Build a step from the first two or three modules if they are a convolution, its pool and perhaps a ReLU."""
    if len(modules) < 2:
        return None
    conv, pool, *after = modules
    if isinstance(conv, Conv1d):
        window = window_of(conv, pool) if isinstance(pool, nn.MaxPool1d) else None
    elif isinstance(conv, Conv2d):
        window = window_of(conv, pool) if isinstance(pool, nn.MaxPool2d) else None
    else:
        return None
    if window is None:
        return None
    return Step(conv, pool, after[0] if after and type(after[0]) is nn.ReLU else None, window)
