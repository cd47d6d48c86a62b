"""3 × 3 convolutions of stride 1 with 4 products instead of 9 (Winograd's F(2 × 2, 3 × 3)). Used by `conv/modules.py`
and `conv_pool.py`.

Outputs are computed in tiles of 2 × 2 from the 4 × 4 inputs they depend on. Tile and kernel are transformed (sums only)
so that the tile's outputs are transforms of 16 products summed over channels, which are 16 matrix products:

    V = Bᵀ d B    U = G k Gᵀ    M[x] = V[x] U[x]  for x in 16     output = Aᵀ M A

The gradient of the image is the same convolution with the kernel rotated by 180°. The gradient of the kernel runs
backwards through it: dU[x] = Σ V[x]ᵀ (A g Aᵀ)[x] over all tiles, dk = Gᵀ dU G.

A block of tiles is transformed, multiplied and transformed back while it is in a core's cache. Errors are about as
large as those of the direct method: there are more sums, but each product is summed over fewer terms.

    image (n, h, w, c), output (n, H, W, o), contiguous; kernel (o, c, 3, 3) in any layout; t tiles of a block
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from podium.kernels.conv.memory import channels_last_empty
from podium.kernels.conv.winograd_weights import matrix, transformed
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

#: sums of a matrix product that stay in registers: this many rows by this many vectors; AVX-512 has twice as many
_ROWS, _VECTORS = (12 if WIDTH == 16 else 6), 2
#: the fewest tiles of a block, if there are as many: the transformed kernel is read once for each block
_LEAST_TILES = 12
#: Measured on AVX2, two threads: 1.2 to 1.9 times as fast as the library's kernels with 16 to 256 channels, 1.8 to 3
#: times for the gradient of the kernel; half as fast with 512, whose transformed kernel is too large for the cache.
#: With AVX-512, both passes with 32 channels: 1.3 times.
_LEAST_CHANNELS, _MOST = 16, 256 * 256
#: so that no two threads write to the same cache line
_APART = 16


@dataclass(frozen=True)
class Geometry:
    """Sizes of one convolution: image (h, w, c), output (H, W, o), and zeros around the image on each side."""

    image: tuple[int, int, int]
    output: tuple[int, int, int]
    padding: tuple[int, int]

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Return the rows and columns of tiles in one sample."""
        return -(-self.output[0] // 2), -(-self.output[1] // 2)

    @cached_property
    def rows(self) -> int:
        """Return the rows of tiles in a block: the minimum that makes enough tiles, the same for all blocks."""
        high, wide = self.tiles
        return next((rows for rows in range(1, high) if high % rows == 0 and rows * wide >= _LEAST_TILES), high)

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of blocks of one sample."""
        return self.tiles[0] // self.rows

    @cached_property
    def num_tiles(self) -> int:
        """Return the number of tiles of one block."""
        return self.rows * self.tiles[1]

    @cached_property
    def inputs(self) -> tuple[int, int, int]:
        """Return the size of one block's inputs: rows, columns, channels."""
        return 2 * self.rows + 2, 2 * self.tiles[1] + 2, self.image[2]

    @cached_property
    def outputs(self) -> tuple[int, int, int]:
        return 2 * self.rows, 2 * self.tiles[1], self.output[2]


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
    routine = _convolution(geometry, bias is not None)
    num_pieces = min(len(image) * geometry.num_blocks, 4 * torch.get_num_threads())
    if output is None:
        output = image.new_empty(len(image), *geometry.output)
    scratch = image.new_empty(num_pieces, routine.num_scratch)
    routine(num_pieces, len(image), image, transformed(kernel, backwards), 0 if bias is None else bias, output, scratch)
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
    routine = _kernel_gradient(geometry)
    num_pieces = min(len(image) * geometry.num_blocks, torch.get_num_threads())
    c, o = geometry.image[2], geometry.output[2]
    sums = image.new_zeros(num_pieces, 16, c * o)
    scratch = image.new_empty(num_pieces, routine.num_scratch)
    routine(num_pieces, len(image), image, grad, sums, scratch)
    total = sums[0] if num_pieces == 1 else sums.sum(0)
    of_kernel = (matrix().t() @ total).view(3, 3, c, o)
    return of_kernel.permute(3, 0, 1, 2).contiguous().permute(0, 3, 1, 2)


@machine_code
def _convolution(geometry: Geometry, has_bias: bool) -> Code:
    c, o, t = geometry.image[2], geometry.output[2], geometry.num_tiles
    sizes = {"inputs": math.prod(geometry.inputs), "V": 16 * t * c, "M": 16 * t * o}
    code = Code(num_arguments=6)
    num_samples, image, kernel, bias, output, scratch = code.arguments
    kernel_of, bias_of = code.pointer(kernel, FLOAT), code.pointer(bias, FLOAT)
    with _every_block(code, geometry, num_samples, scratch, sizes) as (_, sample, first, parts):
        image_of = code.pointer(image, FLOAT, code.times(sample, math.prod(geometry.image)))
        output_of = code.pointer(output, FLOAT, code.times(sample, math.prod(geometry.output)))
        _cut_out(code, image_of, geometry.image, first, geometry.padding, parts["inputs"], geometry.inputs)
        _transform_inputs(code, geometry, parts["inputs"], parts["V"])
        with code.loop(number(0), number(16)) as x:
            v = code.pointer(parts["V"], FLOAT, code.times(x, t * c))
            u = code.pointer(kernel_of, FLOAT, code.times(x, c * o))
            m = code.pointer(parts["M"], FLOAT, code.times(x, t * o))
            _multiply(code, (t, c, o), v, (c, 1), u, m, onto=False)
        with _every_tile(code, geometry, o) as (row, column, tile, at):
            place = code.plus(code.times(tile, o), at)
            m = [code.vector(parts["M"], code.plus(place, number(x * t * o)), WIDTH) for x in range(16)]
            values = _both_ways(m, 4, lambda line: _outputs(code, line))
            if has_bias:
                values = [code.ir.fadd(value, code.vector(bias_of, at, WIDTH)) for value in values]
            _store_tile(code, geometry, values, output_of, code.plus(first, code.times(row, 2)), column, at)
    code.num_scratch = _num_scratch(sizes)
    return code


@machine_code
def _kernel_gradient(geometry: Geometry) -> Code:
    c, o, t = geometry.image[2], geometry.output[2], geometry.num_tiles
    _, wide, _ = geometry.outputs
    sizes = {"inputs": math.prod(geometry.inputs), "V": 16 * t * c}
    sizes |= {"grad": math.prod(geometry.outputs), "Z": 16 * t * o}
    code = Code(num_arguments=5)
    num_samples, image, grad, sums, scratch = code.arguments
    with _every_block(code, geometry, num_samples, scratch, sizes) as (piece, sample, first, parts):
        image_of = code.pointer(image, FLOAT, code.times(sample, math.prod(geometry.image)))
        grad_of = code.pointer(grad, FLOAT, code.times(sample, math.prod(geometry.output)))
        _cut_out(code, image_of, geometry.image, first, geometry.padding, parts["inputs"], geometry.inputs)
        _transform_inputs(code, geometry, parts["inputs"], parts["V"])
        _cut_out(code, grad_of, geometry.output, first, (0, 0), parts["grad"], geometry.outputs)
        with _every_tile(code, geometry, o) as (row, column, tile, at):
            corner = code.plus(code.times(code.plus(code.times(row, wide), column), 2 * o), at)
            g = [
                code.vector(parts["grad"], code.plus(corner, number((i * wide + j) * o)), WIDTH)
                for i in range(2)
                for j in range(2)
            ]
            place = code.plus(code.times(tile, o), at)
            for x, value in enumerate(_both_ways(g, 2, lambda line: _back_to_products(code, line))):
                code.store_vector(value, parts["Z"], code.plus(place, number(x * t * o)))
        with code.loop(number(0), number(16)) as x:
            v = code.pointer(parts["V"], FLOAT, code.times(x, t * c))
            z = code.pointer(parts["Z"], FLOAT, code.times(x, t * o))
            of_x = code.pointer(sums, FLOAT, code.times(code.plus(code.times(piece, 16), x), c * o))
            _multiply(code, (c, t, o), v, (1, c), z, of_x, onto=True)
    code.num_scratch = _num_scratch(sizes)
    return code


@contextmanager
def _every_block(
    code: Code, geometry: Geometry, num_samples: Value, scratch: Value, sizes: dict[str, int]
) -> Iterator[tuple[Value, Value, Value, dict[str, Value]]]:
    """Yield (piece, sample, first row of outputs, the piece's own arrays by name), block by block."""
    with code.every_piece() as piece:
        parts, at = {}, 0
        for name, size in sizes.items():
            start = code.plus(code.times(piece, _num_scratch(sizes)), number(at))
            parts[name] = code.pointer(scratch, FLOAT, start)
            at += size
        num_blocks = number(geometry.num_blocks)
        with code.loop(*code.share(code.times(num_samples, num_blocks), piece)) as block:
            first = code.times(code.ir.urem(block, num_blocks), 2 * geometry.rows)
            yield piece, code.ir.udiv(block, num_blocks), first, parts


def _num_scratch(sizes: dict[str, int]) -> int:
    return sum(sizes.values()) + _APART


def _cut_out(
    code: Code,
    source: Value,
    shape: tuple[int, int, int],
    first: Value,
    padding: tuple[int, int],
    target: Value,
    wanted: tuple[int, int, int],
) -> None:
    """Copy the rows from `first` on (of the image with zeros around it) into `target`, zeros included."""
    high, wide, depth = shape
    num_rows, num_columns, _ = wanted
    left = padding[1]
    inside = min(wide, num_columns - left)
    zero = code.spread(FLOAT(0.0), WIDTH)
    with code.loop(number(0), number(num_rows)) as i:
        row = code.ir.sub(code.plus(first, i), number(padding[0]))
        line = code.times(i, num_columns * depth)

        def zeros(start: int, stop: int, line: Value = line) -> None:
            with code.loop(number(start * depth), number(stop * depth), WIDTH) as at:
                code.store_vector(zero, target, code.plus(line, at))

        # As an unsigned number, a negative row is beyond every image.
        with code.ir.if_else(code.ir.icmp_unsigned("<", row, number(high))) as (there, outside):
            with there:
                zeros(0, left)
                source_line, target_line = code.times(row, wide * depth), code.plus(line, number(left * depth))
                with code.loop(number(0), number(inside * depth), WIDTH) as at:
                    vector = code.vector(source, code.plus(source_line, at), WIDTH)
                    code.store_vector(vector, target, code.plus(target_line, at))
                zeros(left + inside, num_columns)
            with outside:
                zeros(0, num_columns)


def _transform_inputs(code: Code, geometry: Geometry, inputs: Value, v: Value) -> None:
    _, wide, c = geometry.inputs
    with _every_tile(code, geometry, c) as (row, column, tile, at):
        corner = code.plus(code.times(code.plus(code.times(row, wide), column), 2 * c), at)
        d = [
            code.vector(inputs, code.plus(corner, number((i * wide + j) * c)), WIDTH)
            for i in range(4)
            for j in range(4)
        ]
        place = code.plus(code.times(tile, c), at)
        for x, value in enumerate(_both_ways(d, 4, lambda line: _products(code, line))):
            code.store_vector(value, v, code.plus(place, number(x * geometry.num_tiles * c)))


@contextmanager
def _every_tile(code: Code, geometry: Geometry, depth: int) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Yield (row, column, number, channel) for every tile of a block, a vector of channels at a time."""
    wide = geometry.tiles[1]
    with (
        code.loop(number(0), number(geometry.rows)) as row,
        code.loop(number(0), number(wide)) as column,
        code.loop(number(0), number(depth), WIDTH) as at,
    ):
        yield row, column, code.plus(code.times(row, wide), column), at


Line = list[Value]


def _both_ways(square: Line, side: int, transform: Callable[[Line], Line]) -> Line:
    """Transform the columns and then the rows of a square of values, given row by row."""
    columns = [transform(square[j::side]) for j in range(side)]
    return [value for row in zip(*columns, strict=True) for value in transform(list(row))]


def _products(code: Code, d: Line) -> Line:
    """Compute Bᵀ d."""
    build = code.ir
    return [build.fsub(d[0], d[2]), build.fadd(d[1], d[2]), build.fsub(d[2], d[1]), build.fsub(d[1], d[3])]


def _outputs(code: Code, m: Line) -> Line:
    """Compute Aᵀ m."""
    build = code.ir
    return [build.fadd(build.fadd(m[0], m[1]), m[2]), build.fsub(build.fsub(m[1], m[2]), m[3])]


def _back_to_products(code: Code, g: Line) -> Line:
    """Compute A g."""
    build = code.ir
    return [g[0], build.fadd(g[0], g[1]), build.fsub(g[0], g[1]), build.fneg(g[1])]


def _store_tile(
    code: Code, geometry: Geometry, values: Line, output: Value, first_row: Value, column: Value, at: Value
) -> None:
    high, wide, o = geometry.output
    for k, value in enumerate(values):
        i, j = divmod(k, 2)
        y, x = code.plus(first_row, number(i)), code.plus(code.times(column, 2), number(j))
        place = code.plus(code.times(code.plus(code.times(y, wide), x), o), at)
        if (i == 0 or high % 2 == 0) and (j == 0 or wide % 2 == 0):
            code.store_vector(value, output, place)
        else:  # the last tiles of an odd size extend beyond the output
            inside = code.ir.and_(code.ir.icmp_signed("<", y, number(high)), code.ir.icmp_signed("<", x, number(wide)))
            with code.ir.if_then(inside):
                code.store_vector(value, output, place)


def _multiply(
    code: Code,
    sizes: tuple[int, int, int],
    left: Value,
    left_strides: tuple[int, int],
    right: Value,
    target: Value,
    *,
    onto: bool,
) -> None:
    """Set target (rows, columns) to left (rows, inner) · right (inner, columns), or add the product to it."""
    num_rows, num_inner, num_columns = sizes
    num_groups = -(-num_rows // _ROWS)
    small, larger = divmod(num_rows, num_groups)
    vectors = num_columns // WIDTH
    paired = vectors - vectors % _VECTORS
    num_steps = next(steps for steps in (4, 3, 2, 1) if num_inner % steps == 0)

    def groups(rows: int, start: int, stop: int) -> None:
        with code.loop(number(start), number(stop), rows) as row:
            if paired:
                with code.loop(number(0), number(paired * WIDTH), _VECTORS * WIDTH) as column:
                    block(row, rows, column, _VECTORS)
            for vector in range(paired, vectors):
                block(row, rows, number(vector * WIDTH), 1)

    def block(row: Value, rows: int, column: Value, num_vectors: int) -> None:
        def place(i: int, k: int) -> Value:
            return code.plus(code.times(code.plus(row, number(i)), num_columns), code.plus(column, number(k * WIDTH)))

        places = [place(i, k) for i in range(rows) for k in range(num_vectors)]
        zero = code.spread(FLOAT(0.0), WIDTH)
        start = [code.vector(target, at, WIDTH) if onto else zero for at in places]

        def several(turns: Value, sums: Line) -> Line:
            for step in range(num_steps):
                sums = turn(code.plus(code.times(turns, num_steps), number(step)), sums)
            return sums

        def turn(inner: Value, sums: Line) -> Line:
            line = code.plus(code.times(inner, num_columns), column)
            others = [code.vector(right, code.plus(line, number(k * WIDTH)), WIDTH) for k in range(num_vectors)]
            found = []
            for i in range(rows):
                left_row = code.times(code.plus(row, number(i)), left_strides[0])
                factor = code.spread(code.load(left, code.plus(left_row, code.times(inner, left_strides[1]))), WIDTH)
                found += [code.multiply_add(factor, other, sums[i * num_vectors + k]) for k, other in enumerate(others)]
            return found

        for at, total in zip(places, code.fold(number(num_inner // num_steps), start, several), strict=True):
            code.store_vector(total, target, at)

    first = larger * (small + 1)
    if larger:
        groups(small + 1, 0, first)
    if first < num_rows:
        groups(small, first, num_rows)
