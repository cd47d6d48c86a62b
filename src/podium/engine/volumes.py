"""Convolutions 4 × 4 × 4 of stride 2 and padding 1, which halve a volume, and the transposed ones, which double it, as
matrix products. Put on models by `operators.py`.

Both are one thing seen from two sides: a fine volume, a coarse one, and a kernel that says how the numbers of one go
into the other. Each is needed given the other two:

    halved            coarse[o] = Σ_t fine[2 o + t - 1] · kernel[t]        a convolution; the transposed one's gradient
    doubled           fine[2 o + t - 1] = Σ kernel[t] · coarse[o]          the opposite
    kernel_gradient   kernel[t] = Σ_o fine[2 o + t - 1]ᵀ · coarse[o]

Of patches: the 64 · c numbers of each position side by side, and one matrix product (`volume_patches.py`).
Of tiles: even and odd places of the fine volume are phases, in each of which the kernel has two taps along an axis. Two
neighbouring outputs of two taps take 3 products, not 4 (Winograd's F(2, 2)), along three axes 27, not 64: so many
matrix products, the sums before and after which are in `volume_tiles.py`. The numbers are larger then, but each
product is summed over fewer terms: errors of 6e-7 to 7e-7 of a result's size, torch's 2e-7 to 11e-7 (64 and 128
channels, 32 × 32 × 32).

    fine (n, h, w, d, c), coarse (n, H, W, D, o), contiguous; kernel (4, 4, 4, c, o) in memory
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from podium.engine import volume_patches
from podium.engine.machine_code import WIDTH
from podium.engine.volume_tiles import NUM_POINTS, Tiling, empty_points, from_points, to_points

KERNEL, STRIDE, PADDING = (4, 4, 4), (2, 2, 2), (1, 1, 1)
Size = tuple[int, int, int]
#: of patches at a time: a bound on memory (3, 8 and 32 MB could not be told apart in time)
_PATCH_BYTES = 32 << 20
#: Tiles where they were faster than patches: two AVX2 cores, two samples, a coarse side of 16, 64 and 256 channels, in
#: the order above 52, 73 and 82 ms, not 127, 112 and 138; a side of 8, 128 and 256 channels 16, 26 and 16, not 32, 37
#: and 29. With a side of 4 the kernel's points outweigh the volume: 256 and 512 channels 21, 32 and 53, not 16, 26, 16.
_LEAST_SIDE, _LEAST_CHANNELS = 8, 32
#: kernel ↔ its points: a single tile
_KERNEL = Tiling((1, 1, 1), 0, 0, phases=2, spacing=2)


class Halving(torch.autograd.Function):
    """torch's conv3d of (n, c, h, w, d) with this kernel, stride and padding; results are channels-last."""

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
    """torch's conv_transpose3d of (n, o, h, w, d), alike."""

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
    """A weight of either kind, (a, b, 4, 4, 4), with the same values, its memory as the products need it."""
    return weight.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)


def _rows(tensor: Tensor) -> Tensor:
    """(n, h, w, d, c), contiguous, of (n, c, h, w, d)."""
    return tensor.permute(0, 2, 3, 4, 1).contiguous()


def _channels_second(rows: Tensor) -> Tensor:
    return rows.permute(0, 4, 1, 2, 3)


def _empty(n: int, c: int, size: Size) -> Tensor:
    """(n, c, h, w, d), its memory as (n, h, w, d, c). No view: torch lets nobody write into one in place that comes
    out of an operator."""
    h, w, d = size
    return torch.empty_strided((n, c, h, w, d), (c * h * w * d, 1, c * w * d, c * d, c))


def _halves(size: Sequence[int]) -> Size:
    high, wide, deep = (axis // 2 for axis in size)
    return high, wide, deep


def by_tiles(fine_channels: int, coarse_channels: int, coarse: Size) -> bool:
    """Whether by tiles, or of patches."""
    channels = fine_channels, coarse_channels
    whole = all(c % WIDTH == 0 and c >= _LEAST_CHANNELS for c in channels)
    return whole and min(coarse) >= _LEAST_SIDE


def points_of(kernel: Tensor) -> Tensor:
    """(27, 8 · c, o)"""
    c, o = kernel.shape[3:]
    points = to_points(kernel.view(1, *KERNEL, c * o), _KERNEL, "taps")
    return points.as_strided((NUM_POINTS, 8 * c, o), (points.stride(0), o, 1))


def halved(fine: Tensor, kernel: Tensor, points: Tensor | None, bias: Tensor | None, coarse: Tensor) -> None:
    """Fills the coarse volume; `points` are the kernel's where it goes by tiles."""
    n, *size, _ = fine.shape
    high, wide, deep, o = coarse.shape[1:]
    coarse_size = high, wide, deep
    if points is not None:
        products = _multiplied(to_points(fine, _fine_tiles(coarse_size), "inputs"), points)
        from_points(products, _coarse_tiles(coarse_size), coarse, bias)
        return
    rows = coarse.view(-1, o)
    if _is_single(coarse_size, size):
        _product(bias, fine.view(n, -1), _inner(kernel), rows)
        return
    taps = kernel.view(-1, o)
    for first, last, patches in _patches(fine, coarse_size):
        _product(bias, patches, taps, rows[first:last])


def doubled(coarse: Tensor, kernel: Tensor, points: Tensor | None, bias: Tensor | None, fine: Tensor) -> None:
    """Fills the fine volume."""
    n, high, wide, deep, o = coarse.shape
    *size, c = fine.shape[1:]
    if points is not None:
        tiles = high // 2 + 1, wide // 2 + 1, deep // 2 + 1
        inputs = to_points(coarse, Tiling(tiles, 2, -1, phases=1, spacing=1), "inputs", backwards=True)
        products = _multiplied(inputs, points.transpose(1, 2))
        from_points(products, Tiling(tiles, 4, -1, phases=2, spacing=2), fine, bias, backwards=True)
        return
    if _is_single((high, wide, deep), size):
        torch.mm(coarse.view(n, o), _inner(kernel).t(), out=fine.view(n, -1))
        if bias is not None:
            fine.add_(bias)
        return
    taps = kernel.view(-1, o).t()
    num_positions = high * wide * deep
    at_once = min(n, max(1, _PATCH_BYTES // (4 * 64 * c * num_positions)))
    memory = coarse.new_empty(at_once * num_positions, 64 * c)
    for first in range(0, n, at_once):
        part = coarse[first : first + at_once]
        patches = memory[: len(part) * num_positions]
        torch.mm(part.view(-1, o), taps, out=patches)
        volume_patches.lay(patches, (high, wide, deep), fine[first : first + at_once], bias)


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
        kernel[1:3, 1:3, 1:3] = (fine.view(n, -1).t() @ rows).view(2, 2, 2, c, o)
        return kernel
    kernel = fine.new_empty(*KERNEL, c, o)
    flat = kernel.view(-1, o)
    for first, last, patches in _patches(fine, coarse_size):
        if first == 0:
            torch.mm(patches.t(), rows[first:last], out=flat)
        else:
            flat.addmm_(patches.t(), rows[first:last])
    return kernel


def _inner(kernel: Tensor) -> Tensor:
    """(8 · c, o): the taps of a single position that do not fall on zeros."""
    return kernel[1:3, 1:3, 1:3].reshape(-1, kernel.shape[4])


def _is_single(coarse: Size, fine: Sequence[int]) -> bool:
    """Of one position, around which all is zeros."""
    return coarse == (1, 1, 1) and list(fine) == [2, 2, 2]


def _fine_tiles(coarse: Size) -> Tiling:
    return Tiling(_pairs(coarse), 4, -1, phases=2, spacing=2)


def _coarse_tiles(coarse: Size) -> Tiling:
    return Tiling(_pairs(coarse), 2, 0, phases=1, spacing=1)


def _pairs(coarse: Size) -> Size:
    high, wide, deep = (-(-size // 2) for size in coarse)
    return high, wide, deep


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    """Point by point."""
    products = empty_points(left.shape[1], right.shape[2])
    torch.bmm(left, right, out=products)
    return products


def _product(bias: Tensor | None, left: Tensor, right: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)


def _patches(fine: Tensor, coarse: Size) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, the one after the last, patches): of as many lines at a time as stay within bounds."""
    n, c = len(fine), fine.shape[4]
    num_lines, deep = n * coarse[0] * coarse[1], coarse[2]
    of_line = deep * 64 * c
    at_once = min(num_lines, max(1, _PATCH_BYTES // (4 * of_line)))
    memory = fine.new_empty(at_once * deep, 64 * c)
    for first in range(0, num_lines, at_once):
        last = min(num_lines, first + at_once)
        patches = memory[: (last - first) * deep]
        volume_patches.cut(fine, coarse, patches, first)
        yield first * deep, last * deep, patches
