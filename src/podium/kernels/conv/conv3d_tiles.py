"""The transforms of `conv3d_stride2.py`: from tiles of a volume to the factors of its products, and from the products
back to a volume.

All of them are one routine with different parameters. A tile takes from a volume, along each axis, two or three values
that are `spacing` apart; where a volume has phases (its even and its odd places), each phase of a tile is a cube of its
own. A cube is transformed along its three axes; each of its points belongs to a matrix of its own.

    volume (n, h, w, d, c), contiguous; points (27, tiles · n, phases · c), each of the matrices contiguous
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

Line = list[Value]
Transform = Literal["inputs", "taps", "outputs"]
NUM_POINTS = 27
#: Channels that are transformed at a time; a routine's work is divided into lines of tiles times groups of channels.
_CHANNELS = 512
#: Gap between the matrices of two points, so that the same place in all of them does not map to the same cache line.
_APART = 5 * 16
_PIECES_OF_THREAD = 4


@dataclass(frozen=True)
class Tiling:
    """The places of a volume that make up the cubes of a tile: `step · tile + start + phase + spacing · u` per axis."""

    tiles: tuple[int, int, int]
    step: int
    start: int
    phases: int
    spacing: int

    @property
    def num_tiles(self) -> int:
        return math.prod(self.tiles)


def empty_points(num_rows: int, num_columns: int) -> Tensor:
    """Return uninitialised points (27, rows, columns)."""
    stride = num_rows * num_columns + _APART
    return torch.empty(NUM_POINTS * stride).as_strided((NUM_POINTS, num_rows, num_columns), (stride, num_columns, 1))


def to_points(volume: Tensor, tiling: Tiling, transform: Transform, *, backwards: bool = False) -> Tensor:
    """Transform the tiles of a volume into points; with `backwards`, in reverse order."""
    n, c = len(volume), volume.shape[4]
    points = empty_points(n * tiling.num_tiles, tiling.phases**3 * c)
    _run(volume, points, tiling, transform, None, backwards)
    return points


def from_points(
    points: Tensor, tiling: Tiling, volume: Tensor, bias: Tensor | None = None, *, backwards: bool = False
) -> None:
    """Transform points into `volume`, each place of which belongs to one tile; places outside of it are left out."""
    _run(volume, points, tiling, "outputs", bias, backwards)


def _run(
    volume: Tensor, points: Tensor, tiling: Tiling, transform: Transform, bias: Tensor | None, backwards: bool
) -> None:
    n, *size, c = volume.shape
    assert volume.is_contiguous()
    assert points.stride()[1:] == (tiling.phases**3 * c, 1)
    routine = _routine((size[0], size[1], size[2]), c, tiling, transform, bias is not None, backwards)
    num_lines = n * tiling.tiles[0] * tiling.tiles[1] * -(-c // _CHANNELS)
    num_pieces = min(num_lines, _PIECES_OF_THREAD * torch.get_num_threads())
    routine(num_pieces, n, volume, points, points.stride(0), 0 if bias is None else bias)


@machine_code
def _routine(
    size: tuple[int, int, int], c: int, tiling: Tiling, transform: Transform, has_bias: bool, backwards: bool
) -> Code:
    num_in, turned = _TRANSFORMS[transform]
    code = Code(num_arguments=5)
    num_samples, volume, points, of_point, bias = code.arguments
    volume, points, bias = (code.pointer(address, FLOAT) for address in (volume, points, bias))
    phases = list(itertools.product(range(tiling.phases), repeat=3))
    num_blocks = -(-c // _CHANNELS)

    def axis(tile: Value, phase: int, along: int, num: int) -> list[tuple[Value, Value]]:
        """Return (place, whether it exists) for the cube's values along one axis."""
        found = []
        for u in range(num):
            at = code.plus(code.times(tile, tiling.step), number(tiling.start + phase + tiling.spacing * u))
            found.append((at, code.ir.icmp_unsigned("<", at, number(size[along]))))
        return found

    def places(sample: Value, tile: Sequence[Value], phase: Sequence[int], num: int) -> list[tuple[Value, Value]]:
        """Return (where its channels begin or zero, whether it is inside) for each value of a whole cube."""
        axes = [axis(tile[along], phase[along], along, num) for along in range(3)]
        found = []
        for (x, x_in), (y, y_in), (z, z_in) in itertools.product(*axes):
            inside = code.ir.and_(code.ir.and_(x_in, y_in), z_in)
            line = code.plus(code.times(code.plus(code.times(sample, size[0]), x), size[1]), y)
            at = code.times(code.plus(code.times(line, size[2]), z), c)
            found.append((code.ir.select(inside, at, number(0)), inside))
        return found

    def point(x: int) -> Value:
        return code.times(of_point, NUM_POINTS - 1 - x if backwards else x)

    with code.every_piece() as piece:
        num_lines = code.times(num_samples, tiling.tiles[0] * tiling.tiles[1] * num_blocks)
        with code.loop(*code.share(num_lines, piece)) as line:
            block, line_of = _divided(code, line, num_blocks)
            middle, rest = _divided(code, line_of, tiling.tiles[1])
            first, sample = _divided(code, rest, tiling.tiles[0])
            channel = code.times(block, _CHANNELS)
            end = code.plus(channel, number(_CHANNELS))
            end = code.ir.select(code.ir.icmp_signed("<", end, number(c)), end, number(c))
            with code.loop(number(0), number(tiling.tiles[2])) as last:
                row = code.plus(code.times(line_of, tiling.tiles[2]), last)
                for k, phase in enumerate(phases):
                    column = code.plus(code.times(row, len(phases) * c), number(k * c))
                    cube = places(sample, (first, middle, last), phase, 2 if transform != "inputs" else 3)
                    with code.loop(channel, end, WIDTH) as at:
                        if transform == "outputs":
                            values = [
                                code.vector(points, code.plus(code.plus(point(x), column), at), WIDTH)
                                for x in range(NUM_POINTS)
                            ]
                            values = _all_ways(code, values, num_in, turned)
                            if has_bias:
                                added = code.vector(bias, at, WIDTH)
                                values = [code.ir.fadd(value, added) for value in values]
                            for (start, inside), value in zip(cube, values, strict=True):
                                with code.ir.if_then(inside):
                                    code.store_vector(value, volume, code.plus(start, at))
                        else:
                            zero = code.spread(FLOAT(0.0), WIDTH)
                            values = [
                                code.ir.select(inside, code.vector(volume, code.plus(start, at), WIDTH), zero)
                                for start, inside in cube
                            ]
                            for x, value in enumerate(_all_ways(code, values, num_in, turned)):
                                code.store_vector(value, points, code.plus(code.plus(point(x), column), at))
    return code


def _divided(code: Code, value: Value, by: int) -> tuple[Value, Value]:
    """Return (remainder, quotient)."""
    return code.ir.urem(value, number(by)), code.ir.udiv(value, number(by))


def _all_ways(code: Code, cube: Line, side: int, transform: Callable[[Code, Line], Line]) -> Line:
    """Transform a cube of values along its three axes: each pass transforms the first axis and makes it the last."""
    for _ in range(3):
        num = len(cube) // side
        columns = [transform(code, cube[at::num]) for at in range(num)]
        cube = [value for column in columns for value in column]
    return cube


def _of_inputs(code: Code, d: Line) -> Line:
    return [code.ir.fsub(d[0], d[1]), d[1], code.ir.fsub(d[2], d[1])]


def _of_taps(code: Code, g: Line) -> Line:
    return [g[0], code.ir.fadd(g[0], g[1]), g[1]]


def _of_products(code: Code, m: Line) -> Line:
    return [code.ir.fadd(m[0], m[1]), code.ir.fadd(m[1], m[2])]


#: (values along an axis before the transform, the transform)
_TRANSFORMS: dict[Transform, tuple[int, Callable[[Code, Line], Line]]] = {
    "inputs": (3, _of_inputs),
    "taps": (2, _of_taps),
    "outputs": (3, _of_products),
}
