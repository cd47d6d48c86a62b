"""1 × 1 convolutions of stride 1 as matrix products. Used by `conv/modules.py`, where the kernel `products` is in use.

On one thread torch leaves those of fewer than 16 samples to MKL instead of oneDNN: 1.8 to 2.4 times as slow as the
products here (those of a ResNet-50 with 8 samples, AVX-512). On more threads oneDNN does them, about as fast.

    image (n, c, h, w) and output (n, o, h, w), channels last; kernel (o, c, 1, 1) with c innermost
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.kernels.conv.memory import channels_last_empty
from podium.kernels.multiply import pays, product, product_into

#: samples from which torch calls oneDNN on one thread, too
_LEFT_TO_ONEDNN = 16


def fits(image: Tensor, kernel: Tensor, padding: Sequence[int]) -> bool:
    """Return whether a convolution of stride 1 is one of these, and faster here than in the library."""
    o, c, *size = kernel.shape
    alone = torch.get_num_threads() == 1 and len(image) < _LEFT_TO_ONEDNN
    return alone and size == [1, 1] and not any(padding) and pays(image.numel() // c, c, o)


class PointwiseConvolution(torch.autograd.Function):
    """Convolution of channels-last images with a 1 × 1 kernel."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        n, _, h, w = image.shape
        rows, taps = _rows(image), kernel.view(kernel.shape[:2])
        output = channels_last_empty(n, len(kernel), h, w)
        product_into(_rows(output), rows, taps.t(), bias)
        ctx.save_for_backward(image, kernel)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, kernel = ctx.saved_tensors
        wants_image, wants_kernel, wants_bias = ctx.needs_input_grad
        taps, rows = kernel.view(kernel.shape[:2]), _rows(grad.contiguous(memory_format=torch.channels_last))
        of_image = None
        if wants_image:
            of_image = channels_last_empty(*image.shape)
            product_into(_rows(of_image), rows, taps)
        return (
            of_image,
            product(rows.t(), _rows(image)).view(kernel.shape) if wants_kernel else None,
            rows.sum(0) if wants_bias else None,
        )


def _rows(image: Tensor) -> Tensor:
    """Return a channels-last image as (n · h · w, c), in the same memory."""
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])
