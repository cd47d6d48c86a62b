"""The machine code of Winograd's convolutions: transforms, products and transforms back, block by block. Used by
`winograd.py`, where the notation is explained.

    t tiles of a block; V (t, c), M (t, o) and Z, the gradient of M, in panels, for each of the products, a gap between
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from podium.kernels.conv.winograd_products import apart, multiply, panel_place
from podium.kernels.conv.winograd_tiles import Tiling
from podium.kernels.conv.winograd_transforms import PARTS, Line, back_to_products, both_ways, outputs, products
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import constant, scratch_arrays, scratch_size


@machine_code
def convolution(tiling: Tiling, has_bias: bool) -> Code:
    """Write the convolution of `num_samples` images, given U."""
    geometry, t, num_products = tiling.geometry, tiling.num_tiles, tiling.num_products
    (_, w, c), o = geometry.image, geometry.output[2]
    sizes = {"V": num_products * apart(t * c), "M": num_products * apart(t * o), "zeros": w * c}
    code = Code(num_arguments=6)
    num_samples, *arrays, scratch = code.arguments
    image, kernel, bias, output = (code.pointer(array, FLOAT) for array in arrays)
    with code.every_piece() as piece, _every_block(code, tiling, num_samples, piece, scratch, sizes) as block:
        _transform_image(block, image)
        with code.loop(number(0), number(num_products)) as x:
            u = code.pointer(kernel, FLOAT, code.times(x, apart(c * o)))
            multiply(code, (t, c, o), block.matrix("V", x, t * c), (c, 1), u, block.matrix("M", x, t * o), onto=False)
        _transform_back(block, bias if has_bias else None, output)
    code.num_scratch = scratch_size(sizes)
    return code


@machine_code
def accumulation(tiling: Tiling) -> Code:
    """Write the sums over all tiles that give the gradient of U: each piece sets its own."""
    geometry, t, num_products = tiling.geometry, tiling.num_tiles, tiling.num_products
    (_, w, c), (_, wide, o) = geometry.image, geometry.output
    sizes = {"V": num_products * apart(t * c), "Z": num_products * apart(t * o), "zeros": max(w * c, wide * o)}
    num_sums = num_products * apart(c * o)
    code = Code(num_arguments=5)
    num_samples, *arrays, scratch = code.arguments
    image, grad, sums = (code.pointer(array, FLOAT) for array in arrays)
    with code.every_piece() as piece:
        own = code.pointer(sums, FLOAT, code.times(piece, num_sums))
        _clear(code, own, num_sums)
        with _every_block(code, tiling, num_samples, piece, scratch, sizes) as block:
            _transform_image(block, image)
            _transform_gradient(block, grad)
            with code.loop(number(0), number(num_products)) as x:
                of_x = code.pointer(own, FLOAT, code.times(x, apart(c * o)))
                multiply(
                    code, (c, t, o), block.matrix("V", x, t * c), (1, c), block.matrix("Z", x, t * o), of_x, onto=True
                )
    code.num_scratch = scratch_size(sizes)
    return code


@dataclass(frozen=True)
class _Block:
    """A block of tiles, whose code is being written."""

    code: Code
    tiling: Tiling
    #: its own and that of the rows of tiles in all samples; the last block may have more than are left
    number: Value
    num_rows: Value
    #: the piece's own
    arrays: dict[str, Value]

    def matrix(self, name: str, x: Value, size: int) -> Value:
        return self.code.pointer(self.arrays[name], FLOAT, self.code.times(x, apart(size)))

    @contextmanager
    def rows(self) -> Iterator[tuple[Value, Value, Value, Value]]:
        """Yield (number of the row's first tile, whether the row exists, sample, first line of outputs)."""
        code, (high, wide) = self.code, self.tiling.tiles
        with code.loop(number(0), number(self.tiling.rows)) as row:
            of_all = code.plus(code.times(self.number, self.tiling.rows), row)
            exists = code.ir.icmp_signed("<", of_all, self.num_rows)
            first = code.times(code.ir.urem(of_all, number(high)), self.tiling.side)
            yield code.times(row, wide), exists, code.ir.udiv(of_all, number(high)), first


@contextmanager
def _every_block(
    code: Code, tiling: Tiling, num_samples: Value, piece: Value, scratch: Value, sizes: dict[str, int]
) -> Iterator[_Block]:
    """Loop over the blocks of a piece."""
    arrays = scratch_arrays(code, scratch, piece, sizes)
    _clear(code, arrays["zeros"], sizes["zeros"])
    num_rows = code.times(num_samples, tiling.tiles[0])
    num_blocks = code.ir.udiv(code.plus(num_rows, number(tiling.rows - 1)), number(tiling.rows))
    with code.loop(*code.share(num_blocks, piece)) as block:
        yield _Block(code, tiling, block, num_rows, arrays)


def _clear(code: Code, array: Value, size: int) -> None:
    with code.loop(number(0), number(size), WIDTH) as at:
        code.store_vector(constant(0.0), array, at)


def _transform_image(block: _Block, image: Value) -> None:
    """Compute V."""
    code, geometry, side = block.code, block.tiling.geometry, block.tiling.side
    c, apart_by = geometry.image[2], apart(block.tiling.num_tiles * geometry.image[2])
    for load, tile, at in _every_square(block, image, geometry.image, geometry.padding, side + 2):
        place = code.plus(code.times(tile, c), at)
        for part in PARTS[side]:
            for x, value in both_ways(load(), lambda line: products(code, side, line), part):
                code.store_vector(value, block.arrays["V"], code.plus(place, number(x * apart_by)))


def _transform_gradient(block: _Block, grad: Value) -> None:
    """Compute Z."""
    code, geometry, side, t = block.code, block.tiling.geometry, block.tiling.side, block.tiling.num_tiles
    o = geometry.output[2]
    for load, tile, at in _every_square(block, grad, geometry.output, (0, 0), side):
        place = panel_place(code, t, o, tile, at)
        for part in PARTS[side]:
            for x, value in both_ways(load(), lambda line: back_to_products(code, side, line), part):
                code.store_vector(value, block.arrays["Z"], code.plus(place, number(x * apart(t * o))))


def _every_square(
    block: _Block, source: Value, shape: tuple[int, int, int], padding: tuple[int, int], size: int
) -> Iterator[tuple[Callable[[], list[Line]], Value, Value]]:
    """Yield (what loads the square of a tile, the tile's number, channel), a vector of channels at a time.

    A square is size × size values of the source, with zeros for what lies outside.
    """
    code, (high, wide, depth), side = block.code, shape, block.tiling.side
    with block.rows() as (tile, exists, sample, first):
        lines = []
        for i in range(size):
            y = code.plus(first, number(i - padding[0]))
            # As an unsigned number, a negative line is beyond every image.
            inside = code.ir.and_(exists, code.ir.icmp_unsigned("<", y, number(high)))
            place = code.times(code.plus(code.times(sample, high), y), wide * depth)
            lines.append(code.ir.select(inside, code.pointer(source, FLOAT, place), block.arrays["zeros"]))
        for start, stop, columns in _alike(block.tiling.tiles[1], side, padding[1], size, wide):
            with code.loop(number(start), number(stop)) as column, code.loop(number(0), number(depth), WIDTH) as at:
                corner = code.plus(code.times(column, side * depth), at)
                places = [
                    code.plus(corner, number((j - padding[1]) * depth)) if j in columns else None for j in range(size)
                ]
                yield partial(_loaded, code, lines, places), code.plus(tile, column), at


def _loaded(code: Code, lines: list[Value], places: list[Value | None]) -> list[Line]:
    zero = constant(0.0)
    return [[zero if place is None else code.vector(line, place, WIDTH) for place in places] for line in lines]


def _alike(num_tiles: int, side: int, padding: int, size: int, wide: int) -> list[tuple[int, int, range]]:
    """Return groups of tiles in a row with the same columns inside the source: (first, end, columns)."""
    found: list[tuple[int, int, range]] = []
    for tile in range(num_tiles):
        left = tile * side - padding
        inside = range(max(0, -left), max(0, min(size, wide - left)))
        start = found.pop()[0] if found and found[-1][2] == inside else tile
        found.append((start, tile + 1, inside))
    return found


def _transform_back(block: _Block, bias: Value | None, output: Value) -> None:
    """Compute the output from M; the last tiles of a row or a column may stick out of it."""
    code, tiling = block.code, block.tiling
    (high, wide, o), side = tiling.geometry.output, tiling.side
    size, whole = side + 2, wide // side
    groups = [(0, whole, side), (whole, tiling.tiles[1], wide - whole * side)]
    with block.rows() as (tile, exists, sample, first), code.ir.if_then(exists):
        line = code.times(code.plus(code.times(sample, high), first), wide * o)
        for start, stop, num_columns in groups:
            if start == stop:
                continue
            with code.loop(number(start), number(stop)) as column, code.loop(number(0), number(o), WIDTH) as at:
                place = code.plus(code.times(code.plus(tile, column), o), at)
                places = [code.plus(place, number(x * apart(tiling.num_tiles * o))) for x in range(size**2)]
                m = [code.vector(block.arrays["M"], at_x, WIDTH) for at_x in places]
                square = [m[i * size : (i + 1) * size] for i in range(size)]
                values = both_ways(square, lambda line: outputs(code, side, line), range(side))
                corner = code.plus(line, code.plus(code.times(column, side * o), at))
                add = None if bias is None else code.vector(bias, at, WIDTH)
                for i in range(side):
                    inside = code.ir.icmp_signed("<", code.plus(first, number(i)), number(high))
                    with code.ir.if_then(inside) if 0 < high % side <= i else nullcontext():
                        for j in range(num_columns):
                            _, value = values[i * side + j]
                            value = value if add is None else code.ir.fadd(value, add)
                            code.store_vector(value, output, code.plus(corner, number((i * wide + j) * o)))
