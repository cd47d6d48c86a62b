"""3 × 3 convolutions of stride 1 with 4 products instead of 9, or 2.25 (Winograd's F(2 × 2, 3 × 3), F(4 × 4, 3 × 3)).
Used by `conv/modules.py` and `conv_pool.py`.

Outputs are computed in tiles of 2 × 2 from the 4 × 4 inputs they depend on, or of 4 × 4 from 6 × 6. Tile and kernel
are transformed (`winograd_tiles.py`) so that the tile's outputs are transforms of 16 or 36 products summed over
channels, which are as many matrix products:

    V = Bᵀ d B    U = G k Gᵀ    M[x] = V[x] U[x]  for each x    output = Aᵀ M A

The gradient of the image is the same convolution with the kernel rotated by 180°. The gradient of the kernel runs
backwards through it: dU[x] = Σ V[x]ᵀ (A g Aᵀ)[x] over all tiles, dk = Gᵀ dU G.

A block of tiles is transformed, multiplied and transformed back while it is in a core's cache. It consists of rows of
tiles, from one sample or several. Errors are about as large as those of the direct method: there are more sums, but
each product is summed over fewer terms.

    image (n, h, w, c), output (n, H, W, o), contiguous; kernel (o, c, 3, 3) in any layout; t tiles of a block
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from podium.kernels.conv.memory import channels_last_empty
from podium.kernels.conv.winograd_products import apart, multiply, panel_place
from podium.kernels.conv.winograd_tiles import (
    PARTS,
    Line,
    back_to_products,
    both_ways,
    outputs,
    products,
)
from podium.kernels.conv.winograd_weights import gradient, transformed
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import constant, scratch_arrays, scratch_size

#: Tiles of a block, rounded up to whole rows: where there are few, so many that there are enough blocks for all threads,
#: but not too few. Between 14 and 56, times differ by a few percent.
_TILES, _LEAST_TILES, _LEAST_BLOCKS = 24, 8, 8
#: With more channels, transformed kernels for tiles of 4 × 4 are too large for the cache, and nothing is gained; with
#: 256, errors come close to 4e-6.
_MOST_CHANNELS_OF_LARGE = 128
_LEAST_CHANNELS, _MOST = 16, 256 * 256
SIDES = None


@dataclass(frozen=True)
class Geometry:
    """Sizes of one convolution: image (h, w, c), output (H, W, o), and zeros around the image on each side."""

    image: tuple[int, int, int]
    output: tuple[int, int, int]
    padding: tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """How a convolution is divided: tiles of side × side outputs, and blocks of whole rows of them."""

    geometry: Geometry
    side: int
    #: rows of tiles in a block
    rows: int

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Return the rows and columns of tiles in one sample."""
        return _num_tiles(self.geometry, self.side)

    @cached_property
    def num_tiles(self) -> int:
        """Return the number of tiles of one block."""
        return self.rows * self.tiles[1]

    @cached_property
    def num_products(self) -> int:
        return (self.side + 2) ** 2

    def num_blocks(self, num_samples: int) -> int:
        return -(-num_samples * self.tiles[0] // self.rows)


def _num_tiles(geometry: Geometry, side: int) -> tuple[int, int]:
    return -(-geometry.output[0] // side), -(-geometry.output[1] // side)


def tiling_of(geometry: Geometry, num_samples: int) -> Tiling:
    """Return the tiles with the fewest products, in blocks as even as possible."""

    def work(side: int) -> int:
        high, wide = _num_tiles(geometry, side)
        return high * wide * (side + 2) ** 2

    large = max(geometry.image[2], geometry.output[2]) <= _MOST_CHANNELS_OF_LARGE
    side = SIDES or min((2, 4) if large else (2,), key=work)
    high, wide = _num_tiles(geometry, side)
    rows = num_samples * high
    wanted = max(min(_TILES, rows * wide // _LEAST_BLOCKS), _LEAST_TILES)
    num_blocks = -(-rows // -(-wanted // wide))
    return Tiling(geometry, side, -(-rows // num_blocks))


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
    routine = _convolution(tiling, bias is not None)
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
    routine = _kernel_gradient(tiling)
    num_pieces = min(tiling.num_blocks(len(image)), torch.get_num_threads())
    c, o = geometry.image[2], geometry.output[2]
    sums = image.new_empty(num_pieces, tiling.num_products, apart(c * o))
    scratch = image.new_empty(num_pieces, routine.num_scratch)
    routine(num_pieces, len(image), image, grad, sums, scratch)
    return gradient(sums, o, c, tiling.side).permute(0, 3, 1, 2)


@machine_code
def _convolution(tiling: Tiling, has_bias: bool) -> Code:
    geometry, t, side = tiling.geometry, tiling.num_tiles, tiling.side
    (_, w, c), o = geometry.image, geometry.output[2]
    of_v, of_m, of_u = apart(t * c), apart(t * o), apart(c * o)
    sizes = {"V": tiling.num_products * of_v, "M": tiling.num_products * of_m, "zeros": w * c}
    code = Code(num_arguments=6)
    num_samples, image, kernel, bias, output, scratch = code.arguments
    image_of, output_of, kernel_of, bias_of = (
        code.pointer(array, FLOAT) for array in (image, output, kernel, bias)
    )
    with _every_block(code, tiling, num_samples, scratch, sizes) as (_, block, parts):

        def store_products(x: int, value: Value, tile: Value, at: Value) -> None:
            place = code.plus(code.times(tile, c), at)
            code.store_vector(value, parts["V"], code.plus(place, number(x * of_v)))

        rows = _Rows(code, tiling, num_samples, block)
        reader = _Reader(code, tiling, geometry.image, geometry.padding, side + 2, parts["zeros"])
        reader.transform(rows, image_of, products, store_products)
        with code.loop(number(0), number(tiling.num_products)) as x:
            v = code.pointer(parts["V"], FLOAT, code.times(x, of_v))
            u = code.pointer(kernel_of, FLOAT, code.times(x, of_u))
            m = code.pointer(parts["M"], FLOAT, code.times(x, of_m))
            multiply(code, (t, c, o), v, (c, 1), u, m, onto=False)
        _store_outputs(code, tiling, rows, parts["M"], of_m, bias_of if has_bias else None, output_of)
    code.num_scratch = scratch_size(sizes)
    return code


@machine_code
def _kernel_gradient(tiling: Tiling) -> Code:
    geometry, t, side = tiling.geometry, tiling.num_tiles, tiling.side
    (_, w, c), (_, wide, o) = geometry.image, geometry.output
    of_v, of_z, of_u = apart(t * c), apart(t * o), apart(c * o)
    sizes = {"V": tiling.num_products * of_v, "Z": tiling.num_products * of_z, "zeros": max(w * c, wide * o)}
    code = Code(num_arguments=5)
    num_samples, image, grad, sums, scratch = code.arguments
    image_of, grad_of, sums_of = (code.pointer(array, FLOAT) for array in (image, grad, sums))
    num_sums = tiling.num_products * of_u

    def clear(piece: Value) -> None:
        _clear(code, code.pointer(sums_of, FLOAT, code.times(piece, num_sums)), num_sums)

    with _every_block(code, tiling, num_samples, scratch, sizes, clear) as (piece, block, parts):

        def store_v(x: int, value: Value, tile: Value, at: Value) -> None:
            place = code.plus(code.times(tile, c), at)
            code.store_vector(value, parts["V"], code.plus(place, number(x * of_v)))

        def store_z(x: int, value: Value, tile: Value, at: Value) -> None:
            place = panel_place(code, t, o, tile, at)
            code.store_vector(value, parts["Z"], code.plus(place, number(x * of_z)))

        rows = _Rows(code, tiling, num_samples, block)
        reader = _Reader(code, tiling, geometry.image, geometry.padding, side + 2, parts["zeros"])
        reader.transform(rows, image_of, products, store_v)
        reader = _Reader(code, tiling, geometry.output, (0, 0), side, parts["zeros"])
        reader.transform(rows, grad_of, back_to_products, store_z)
        with code.loop(number(0), number(tiling.num_products)) as x:
            v = code.pointer(parts["V"], FLOAT, code.times(x, of_v))
            z = code.pointer(parts["Z"], FLOAT, code.times(x, of_z))
            of_x = code.pointer(
                sums_of, FLOAT, code.times(code.plus(code.times(piece, tiling.num_products), x), of_u)
            )
            multiply(code, (c, t, o), v, (1, c), z, of_x, onto=True)
    code.num_scratch = scratch_size(sizes)
    return code


@contextmanager
def _every_block(
    code: Code,
    tiling: Tiling,
    num_samples: Value,
    scratch: Value,
    sizes: dict[str, int],
    before: Callable[[Value], None] = lambda piece: None,
) -> Iterator[tuple[Value, Value, dict[str, Value]]]:
    """Yield (piece, block, the piece's own arrays by name), block by block; "zeros" holds zeros.

    `before` writes what happens before a piece's first block.
    """
    with code.every_piece() as piece:
        parts = scratch_arrays(code, scratch, piece, sizes)
        _clear(code, parts["zeros"], sizes["zeros"])
        before(piece)
        num_rows = code.times(num_samples, tiling.tiles[0])
        num_blocks = code.ir.udiv(code.plus(num_rows, number(tiling.rows - 1)), number(tiling.rows))
        with code.loop(*code.share(num_blocks, piece)) as block:
            yield piece, block, parts


def _clear(code: Code, array: Value, size: int) -> None:
    with code.loop(number(0), number(size), WIDTH) as at:
        code.store_vector(constant(0.0), array, at)


class _Rows:
    """The rows of tiles in a block; the last block's may go beyond the last sample."""

    def __init__(self, code: Code, tiling: Tiling, num_samples: Value, block: Value) -> None:
        self._code, self._tiling, self._block = code, tiling, block
        self._num_rows = code.times(num_samples, tiling.tiles[0])

    @contextmanager
    def each(self) -> Iterator[tuple[Value, Value, Value, Value]]:
        """Yield (number of the row's first tile, whether it exists, sample, first line of outputs)."""
        code, (high, wide) = self._code, self._tiling.tiles
        with code.loop(number(0), number(self._tiling.rows)) as row:
            number_of = code.plus(code.times(self._block, self._tiling.rows), row)
            exists = code.ir.icmp_signed("<", number_of, self._num_rows)
            sample = code.ir.udiv(number_of, number(high))
            first = code.times(code.ir.urem(number_of, number(high)), self._tiling.side)
            yield code.times(row, wide), exists, sample, first


class _Reader:
    """What transforms squares of an image or a gradient, with zeros for what lies outside; `size` values a side."""

    def __init__(
        self,
        code: Code,
        tiling: Tiling,
        shape: tuple[int, int, int],
        padding: tuple[int, int],
        size: int,
        zeros: Value,
    ) -> None:
        self._code, self._tiling, self._shape, self._padding = code, tiling, shape, padding
        self._size, self._zeros = size, zeros

    def transform(
        self,
        rows: _Rows,
        source: Value,
        transform: Callable[[Code, int, Line], Line],
        store: Callable[[int, Value, Value, Value], None],
    ) -> None:
        """Call `store` with each product's number, its factors, the tile's number, and the first of the channels."""
        code, (high, wide, depth), side = self._code, self._shape, self._tiling.side
        with rows.each() as (tile, exists, sample, first):
            lines = []
            for i in range(self._size):
                y = code.plus(first, number(i - self._padding[0]))
                # As an unsigned number, a negative line is beyond every image.
                inside = code.ir.and_(exists, code.ir.icmp_unsigned("<", y, number(high)))
                place = code.times(code.plus(code.times(sample, high), y), wide * depth)
                lines.append(code.ir.select(inside, code.pointer(source, FLOAT, place), self._zeros))
            for start, stop, columns in self._groups():
                with (
                    code.loop(number(start), number(stop)) as column,
                    code.loop(number(0), number(depth), WIDTH) as at,
                ):
                    corner = code.plus(code.times(column, side * depth), at)
                    for part in PARTS[side]:
                        square = [[self._value(line, corner, j, columns) for j in range(self._size)] for line in lines]
                        for x, value in both_ways(square, lambda line: transform(code, side, line), part):
                            store(x, value, code.plus(tile, column), at)

    def _value(self, line: Value, corner: Value, column: int, inside: range) -> Value:
        if column not in inside:
            return constant(0.0)
        at = number((column - self._padding[1]) * self._shape[2])
        return self._code.vector(line, self._code.plus(corner, at), WIDTH)

    def _groups(self) -> list[tuple[int, int, range]]:
        """Return groups of tiles in a row with the same columns inside the source: (first, end, columns)."""
        found: list[tuple[int, int, range]] = []
        for column in range(self._tiling.tiles[1]):
            left = column * self._tiling.side - self._padding[1]
            inside = range(max(0, -left), min(self._size, self._shape[1] - left))
            if found and found[-1][2] == inside:
                found[-1] = found[-1][0], column + 1, inside
            else:
                found.append((column, column + 1, inside))
        return found


def _store_outputs(
    code: Code, tiling: Tiling, rows: _Rows, m: Value, of_m: int, bias: Value | None, output: Value
) -> None:
    """Transform the products back; the last tiles of a row or a column may stick out of the output."""
    (high, wide, o), side = tiling.geometry.output, tiling.side
    num_inside = wide // side  # tiles of a row that do not stick out
    groups = [(0, num_inside, side), (num_inside, tiling.tiles[1], wide - num_inside * side)]
    with rows.each() as (tile, exists, sample, first), code.ir.if_then(exists):
        line = code.times(code.plus(code.times(sample, high), first), wide * o)
        for start, stop, num_columns in groups:
            if start == stop:
                continue
            with code.loop(number(start), number(stop)) as column, code.loop(number(0), number(o), WIDTH) as at:
                place = code.plus(code.times(code.plus(tile, column), o), at)
                values = [
                    code.vector(m, code.plus(place, number(x * of_m)), WIDTH) for x in range(tiling.num_products)
                ]
                size = side + 2
                square = [values[i * size : (i + 1) * size] for i in range(size)]
                values = [value for _, value in both_ways(square, lambda line: outputs(code, side, line), range(side))]
                if bias is not None:
                    add = code.vector(bias, at, WIDTH)
                    values = [code.ir.fadd(value, add) for value in values]
                corner = code.plus(line, code.plus(code.times(column, side * o), at))
                for i in range(side):

                    def store(i: int = i) -> None:
                        for j in range(num_columns):
                            at = code.plus(corner, number((i * wide + j) * o))
                            code.store_vector(values[i * side + j], output, at)

                    if high % side == 0 or i < high % side:
                        store()
                    else:
                        with code.ir.if_then(code.ir.icmp_signed("<", code.plus(first, number(i)), number(high))):
                            store()
