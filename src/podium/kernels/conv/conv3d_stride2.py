"""4 × 4 × 4 convolutions of stride 2 and padding 1, which halve a volume, and the transposed ones, which double it, as
matrix products. `kernels/install.py` applies them to models through `install`.

Both relate the same three things: a fine volume, a coarse volume, and a kernel that maps between them. Each of the
three is computed from the other two:

    halved            coarse[o] = Σ_t fine[2 o + t - 1] · kernel[t]        convolution; gradient of the transposed one
    doubled           fine[2 o + t - 1] = Σ kernel[t] · coarse[o]          transposed; gradient of the convolution
    kernel_gradient   kernel[t] = Σ_o fine[2 o + t - 1]ᵀ · coarse[o]

By patches: the 64 · c values of each position are laid side by side for one matrix product (`conv3d_patches.py`).
By tiles: the even and odd places of the fine volume are phases, in each of which the kernel has two taps along an axis.
Two neighbouring outputs of two taps take 3 products instead of 4 (Winograd's F(2, 2)), and along three axes 27 instead
of 64. That makes 27 matrix products; the sums before and after them are in `conv3d_tiles.py`. Intermediate values are
larger, but each product is summed over fewer terms: errors are 6e-7 to 7e-7 of a result's size, torch's are 2e-7 to
11e-7 (64 and 128 channels, 32 × 32 × 32).

    fine (n, h, w, d, c), coarse (n, H, W, D, o), contiguous; kernel (4, 4, 4, c, o) in memory
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.kernels import registry
from podium.kernels.conv import conv3d_patches
from podium.kernels.conv.conv3d_tiles import NUM_POINTS, Tiling, empty_points, from_points, to_points
from podium.kernels.eligibility import is_foreign
from podium.kernels.jit.llvm import WIDTH
from podium.kernels.multiply import product, product_into

KERNEL, STRIDE, PADDING = (4, 4, 4), (2, 2, 2), (1, 1, 1)
Size = tuple[int, int, int]
#: bytes of patches at a time, to bound memory (3, 8 and 32 MB showed no difference in time)
PATCH_BYTES = 32 << 20
#: Tiles are used where they were faster than patches. On two AVX2 cores, two samples, in the order above: with a coarse
#: side of 16, 64 and 256 channels, 52, 73 and 82 ms instead of 127, 112 and 138; with a side of 8, 128 and 256
#: channels, 16, 26 and 16 instead of 32, 37 and 29. With a side of 4 the kernel's points outweigh the volume: 256 and
#: 512 channels take 21, 32 and 53 by tiles, 16, 26 and 16 by patches.
_LEAST_SIDE, _LEAST_CHANNELS = 8, 32
#: for the transform between a kernel and its points: a single tile
_KERNEL = Tiling((1, 1, 1), 0, 0, phases=2, spacing=2)


class Halving(torch.autograd.Function):
    """torch's conv3d of (n, c, h, w, d) with this kernel size, stride and padding; results are channels-last."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        n, c, *size = image.shape
        coarse, o = _halves(size), len(weight)
        fine, kernel = _rows(image), weight.permute(2, 3, 4, 1, 0).contiguous()
        points = points_of(kernel) if by_tiles(c, o, coarse) else None
        result = _empty(n, o, coarse)
        halved(fine, kernel, points, bias, _rows(result))
        ctx.save_for_backward(fine, kernel, points)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fine, kernel, points = ctx.saved_tensors
        coarse = _rows(grad)
        wants_image, wants_weight, wants_bias = ctx.needs_input_grad
        of_image = torch.empty_like(fine) if wants_image else None
        if of_image is not None:
            doubled(coarse, kernel, points, None, of_image)
        return (
            None if of_image is None else _channels_second(of_image),
            kernel_gradient(fine, coarse).permute(4, 3, 0, 1, 2) if wants_weight else None,
            coarse.view(-1, coarse.shape[-1]).sum(0) if wants_bias else None,
        )


class Doubling(torch.autograd.Function):
    """torch's conv_transpose3d of (n, o, h, w, d), likewise."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, size: Size) -> Tensor:
        n, o, high, wide, deep = image.shape
        c = weight.shape[1]
        coarse, kernel = _rows(image), weight.permute(2, 3, 4, 1, 0).contiguous()
        points = points_of(kernel) if by_tiles(c, o, (high, wide, deep)) else None
        result = _empty(n, c, size)
        doubled(coarse, kernel, points, bias, _rows(result))
        ctx.save_for_backward(coarse, kernel, points)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        coarse, kernel, points = ctx.saved_tensors
        fine = _rows(grad)
        wants_image, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_image = torch.empty_like(coarse) if wants_image else None
        if of_image is not None:
            halved(fine, kernel, points, None, of_image)
        return (
            None if of_image is None else _channels_second(of_image),
            kernel_gradient(fine, coarse).permute(4, 3, 0, 1, 2) if wants_weight else None,
            fine.view(-1, fine.shape[-1]).sum(0) if wants_bias else None,
            None,
        )


def kernel_outermost(weight: Tensor) -> Tensor:
    """Return a weight of either kind, (a, b, 4, 4, 4), with its values in the memory order that the products need."""
    return weight.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)


def _rows(tensor: Tensor) -> Tensor:
    """Return (n, c, h, w, d) as a contiguous (n, h, w, d, c)."""
    return tensor.permute(0, 2, 3, 4, 1).contiguous()


def _channels_second(rows: Tensor) -> Tensor:
    return rows.permute(0, 4, 1, 2, 3)


def _empty(n: int, c: int, size: Size) -> Tensor:
    """Return an empty (n, c, h, w, d) whose memory order is (n, h, w, d, c).

    It is not a view: torch forbids in-place writes to a view returned by an operator.
    """
    h, w, d = size
    return torch.empty_strided((n, c, h, w, d), (c * h * w * d, 1, c * w * d, c * d, c))


def _halves(size: Sequence[int]) -> Size:
    high, wide, deep = (axis // 2 for axis in size)
    return high, wide, deep


def by_tiles(fine_channels: int, coarse_channels: int, coarse: Size) -> bool:
    """Return whether to compute by tiles rather than by patches."""
    channels = fine_channels, coarse_channels
    whole = all(c % WIDTH == 0 and c >= _LEAST_CHANNELS for c in channels)
    return whole and min(coarse) >= _LEAST_SIDE


def points_of(kernel: Tensor) -> Tensor:
    """Transform a kernel into its points (27, 8 · c, o)."""
    c, o = kernel.shape[3:]
    points = to_points(kernel.view(1, *KERNEL, c * o), _KERNEL, "taps")
    return points.as_strided((NUM_POINTS, 8 * c, o), (points.stride(0), o, 1))


def halved(fine: Tensor, kernel: Tensor, points: Tensor | None, bias: Tensor | None, coarse: Tensor) -> None:
    """Fill the coarse volume; `points` are the kernel's if it is computed by tiles."""
    n, *size, _ = fine.shape
    high, wide, deep, o = coarse.shape[1:]
    coarse_size = high, wide, deep
    if points is not None:
        products = _multiplied(to_points(fine, _fine_tiles(coarse_size), "inputs"), points)
        from_points(products, _coarse_tiles(coarse_size), coarse, bias)
        return
    rows = coarse.view(-1, o)
    if _is_single(coarse_size, size):
        product_into(rows, fine.view(n, -1), _inner(kernel), bias)
        return
    taps = kernel.view(-1, o)
    for first, last, patches in _patches(fine, coarse_size):
        product_into(rows[first:last], patches, taps, bias)


def doubled(coarse: Tensor, kernel: Tensor, points: Tensor | None, bias: Tensor | None, fine: Tensor) -> None:
    """Fill the fine volume."""
    n, high, wide, deep, o = coarse.shape
    *size, c = fine.shape[1:]
    if points is not None:
        tiles = high // 2 + 1, wide // 2 + 1, deep // 2 + 1
        inputs = to_points(coarse, Tiling(tiles, 2, -1, phases=1, spacing=1), "inputs", backwards=True)
        products = _multiplied(inputs, points.transpose(1, 2))
        from_points(products, Tiling(tiles, 4, -1, phases=2, spacing=2), fine, bias, backwards=True)
        return
    if _is_single((high, wide, deep), size):
        product_into(fine.view(n, -1), coarse.view(n, o), _inner(kernel).t())
        if bias is not None:
            fine.add_(bias)
        return
    taps = kernel.view(-1, o).t()
    num_positions = high * wide * deep
    at_once = min(n, max(1, PATCH_BYTES // (4 * 64 * c * num_positions)))
    memory = coarse.new_empty(at_once * num_positions, 64 * c)
    for first in range(0, n, at_once):
        part = coarse[first : first + at_once]
        patches = memory[: len(part) * num_positions]
        product_into(patches, part.view(-1, o), taps)
        conv3d_patches.lay(patches, (high, wide, deep), fine[first : first + at_once], bias)


def kernel_gradient(fine: Tensor, coarse: Tensor) -> Tensor:
    n, *size, c = fine.shape
    _, high, wide, deep, o = coarse.shape
    coarse_size = high, wide, deep
    if by_tiles(c, o, coarse_size):
        kernel = fine.new_empty(1, *KERNEL, c * o)
        inputs = to_points(fine, _fine_tiles(coarse_size), "inputs")
        products = _multiplied(inputs.transpose(1, 2), to_points(coarse, _coarse_tiles(coarse_size), "taps"))
        flat = products.as_strided((NUM_POINTS, 1, 8 * c * o), (products.stride(0), 8 * c * o, 1))
        from_points(flat, _KERNEL, kernel)
        return kernel.view(*KERNEL, c, o)
    rows = coarse.view(-1, o)
    if _is_single(coarse_size, size):
        kernel = fine.new_zeros(*KERNEL, c, o)
        kernel[1:3, 1:3, 1:3] = product(fine.view(n, -1).t(), rows).view(2, 2, 2, c, o)
        return kernel
    kernel = fine.new_empty(*KERNEL, c, o)
    flat = kernel.view(-1, o)
    for first, last, patches in _patches(fine, coarse_size):
        if first == 0:
            product_into(flat, patches.t(), rows[first:last])
        else:
            product_into(flat, patches.t(), rows[first:last], flat)
    return kernel


def _inner(kernel: Tensor) -> Tensor:
    """Return, as (8 · c, o), the taps of a single position that do not fall on the zero border."""
    return kernel[1:3, 1:3, 1:3].reshape(-1, kernel.shape[4])


def _is_single(coarse: Size, fine: Sequence[int]) -> bool:
    """Return whether the volume has a single position, surrounded by zeros."""
    return coarse == (1, 1, 1) and list(fine) == [2, 2, 2]


def _fine_tiles(coarse: Size) -> Tiling:
    return Tiling(_pairs(coarse), 4, -1, phases=2, spacing=2)


def _coarse_tiles(coarse: Size) -> Tiling:
    return Tiling(_pairs(coarse), 2, 0, phases=1, spacing=1)


def _pairs(coarse: Size) -> Size:
    high, wide, deep = (-(-size // 2) for size in coarse)
    return high, wide, deep


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the matrices point by point."""
    products = empty_points(left.shape[1], right.shape[2])
    if registry.find("products") is None:
        torch.bmm(left, right, out=products)
    else:
        for at in range(NUM_POINTS):
            product_into(products[at], left[at], right[at])
    return products


def _patches(fine: Tensor, coarse: Size) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, end row, patches) for as many lines at a time as the memory bound allows."""
    n, c = len(fine), fine.shape[4]
    num_lines, deep = n * coarse[0] * coarse[1], coarse[2]
    of_line = deep * 64 * c
    at_once = min(num_lines, max(1, PATCH_BYTES // (4 * of_line)))
    memory = fine.new_empty(at_once * deep, 64 * c)
    for first in range(0, num_lines, at_once):
        last = min(num_lines, first + at_once)
        patches = memory[: (last - first) * deep]
        conv3d_patches.cut(fine, coarse, patches, first)
        yield first * deep, last * deep, patches


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain module that halves or doubles to one of the classes below."""
    faster = {nn.Conv3d: _Conv3d, nn.ConvTranspose3d: _ConvTranspose3d}.get(type(module))
    if faster is not None and isinstance(module, nn.Conv3d | nn.ConvTranspose3d) and _is_halving(module):
        module.__class__ = faster
        module.weight.data = kernel_outermost(module.weight.data)


class _Conv3d(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        if not _fits(self, input) or min(input.shape[2:]) < 2:
            return super().forward(input)
        result: Tensor = Halving.apply(input, self.weight, self.bias)
        return result


class _ConvTranspose3d(nn.ConvTranspose3d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not _fits(self, input) or output_size is not None:
            return super().forward(input, output_size)
        size = tuple(2 * axis + more for axis, more in zip(input.shape[2:], self.output_padding, strict=True))
        result: Tensor = Doubling.apply(input, self.weight, self.bias, size)
        return result


def _is_halving(conv: nn.Conv3d | nn.ConvTranspose3d) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and conv.padding_mode == "zeros"
    return plain and (conv.kernel_size, conv.stride, conv.padding) == (KERNEL, STRIDE, PADDING)


def _fits(conv: nn.Conv3d | nn.ConvTranspose3d, input: Tensor) -> bool:
    if is_foreign(input) or is_foreign(conv.weight):
        return False
    return input.dim() == 5 and input.shape[1] == conv.in_channels and input.numel() > 0
