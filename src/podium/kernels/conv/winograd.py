"""3 × 3 convolutions of stride 1 with 2.25 or 4 products instead of 9 (Winograd's F(4 × 4, 3 × 3), F(2 × 2, 3 × 3)).
Used by `conv/modules.py` and `conv_pool.py`.

Outputs are computed in tiles of 4 × 4 from the 6 × 6 inputs they depend on, or of 2 × 2 from 4 × 4. Tile and kernel
are transformed (`winograd_transforms.py`) so that the tile's outputs are transforms of 36 or 16 products summed over
channels, which are as many matrix products:

    V = Bᵀ d B    U = G k Gᵀ    M[x] = V[x] U[x]  for each x    output = Aᵀ M A

The gradient of the image is the same convolution with the kernel rotated by 180°. The gradient of the kernel runs
backwards through it: dU[x] = Σ V[x]ᵀ (A g Aᵀ)[x] over all tiles, dk = Gᵀ dU G.

A block of tiles is transformed, multiplied and transformed back while it is in a core's cache. The largest errors
against float64, as a share of the largest value, are 0.6e-6 to 2.7e-6 with tiles of 4 × 4 and 0.2e-6 to 0.8e-6 with
tiles of 2 × 2; those of the direct method are 0.4e-6 to 2.7e-6, as it sums more products one after the other.

    image (n, h, w, c), output (n, H, W, o), contiguous; kernel (o, c, 3, 3) in any layout
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.kernels.conv.memory import channels_last_empty
from podium.kernels.conv.winograd_products import apart
from podium.kernels.conv.winograd_routines import accumulation, convolution
from podium.kernels.conv.winograd_tiles import Geometry, tiling_of
from podium.kernels.conv.winograd_weights import gradient, transformed
from podium.kernels.jit.llvm import WIDTH

#: Measured on one thread with 8 to 128 samples, 16 to 256 channels, and 8² to 56² positions. With AVX-512: 2.3 to 3.1
#: times as fast as the library's kernels, 1.9 with 256 channels, in both passes; 1.7 and more for the 11² outputs of 8
#: samples, 1.4 and more for one or two; on two threads 1.5 to 2.9, 1.2 and more for 11². With AVX2: 2.5 to 3.3 times,
#: gradients of kernels 2.8 to 4.8; 1.9 and 2.5 with 256 channels. With 512, whose transformed kernel is too large for
#: the caches, kernels' gradients are slower than in the library, the rest is as fast.
_LEAST_CHANNELS, _MOST = 16, 256 * 256


def fits(image: Tensor, kernel: Tensor, padding: Sequence[int]) -> bool:
    """Return whether a convolution of stride 1 can be computed here, and faster than in the library."""
    o, c, *size = kernel.shape
    whole = all(i + 2 * p >= 3 and p <= 2 for i, p in zip(image.shape[2:], padding, strict=True))
    return size == [3, 3] and whole and c % WIDTH == o % WIDTH == 0 and min(c, o) >= _LEAST_CHANNELS and c * o <= _MOST


class WinogradConvolution(torch.autograd.Function):
    """Convolution of channels-last images (n, c, h, w) with stride 1 and at most two zeros on each side."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        _, c, h, w = image.shape
        high, wide = (size + 2 * around - 2 for size, around in zip((h, w), padding, strict=True))
        ctx.geometry = Geometry((h, w, c), (high, wide, len(kernel)), padding)
        ctx.save_for_backward(image, kernel)
        # Not a view: torch forbids in-place writes to a view returned by an operator.
        output = channels_last_empty(len(image), len(kernel), high, wide)
        convolved(image.permute(0, 2, 3, 1), kernel, bias, ctx.geometry, output.permute(0, 2, 3, 1))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, kernel = ctx.saved_tensors
        image, grad = image.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1).contiguous()
        wants_image, wants_kernel, wants_bias, _ = ctx.needs_input_grad
        of_image = image_gradient(grad, kernel, ctx.geometry).permute(0, 3, 1, 2) if wants_image else None
        of_kernel = kernel_gradient(image, grad, ctx.geometry) if wants_kernel else None
        of_bias = grad.sum((0, 1, 2)) if wants_bias else None
        return of_image, of_kernel, of_bias, None


def convolved(
    image: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    output: Tensor | None = None,
    *,
    backwards: bool = False,
) -> Tensor:
    """Return the output; if `output` is smaller than the whole, the rest is left out.

    `backwards`: with the kernel rotated by 180°, from its outputs to its inputs.
    """
    tiling = tiling_of(geometry, len(image))
    routine = convolution(tiling, bias is not None)
    num_pieces = min(tiling.num_blocks(len(image)), 4 * torch.get_num_threads())
    if output is None:
        output = image.new_empty(len(image), *geometry.output)
    scratch = image.new_empty(num_pieces, routine.num_scratch)
    u = transformed(kernel, tiling.side, backwards)
    routine(num_pieces, len(image), image, u, 0 if bias is None else bias, output, scratch)
    return output


def image_gradient(grad: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of the image, given that of the whole output."""
    h, w, _ = geometry.image
    around = 2 - geometry.padding[0], 2 - geometry.padding[1]
    backwards = Geometry(geometry.output, (h, w, geometry.image[2]), around)
    return convolved(grad, kernel, None, backwards, backwards=True)


def kernel_gradient(image: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of the kernel, (o, c, 3, 3) with c innermost.

    The blocks are divided into as many pieces as there are threads, each with a sum of its own: their number is part of
    the numerics, as with torch's operators.
    """
    tiling = tiling_of(geometry, len(image))
    routine = accumulation(tiling)
    num_pieces = min(tiling.num_blocks(len(image)), torch.get_num_threads())
    c, o = geometry.image[2], geometry.output[2]
    sums = image.new_empty(num_pieces, tiling.num_products, apart(c * o))
    scratch = image.new_empty(num_pieces, routine.num_scratch)
    routine(num_pieces, len(image), image, grad, sums, scratch)
    return gradient(sums, o, c, tiling.side).permute(0, 3, 1, 2)
