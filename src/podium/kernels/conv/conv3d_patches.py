"""Patches of 4 × 4 × 4 values, two apart: cut out of volumes, and added back into volumes where they overlap. Used by
`conv3d_stride2.py`.

volume (n, h, w, d, c), contiguous, with a border of zeros one wide; patches (n · H · W · D, 4 · 4 · 4 · c)
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

KERNEL = 4
_PIECES_OF_THREAD = 4
Size = tuple[int, int, int]


def cut(volume: Tensor, coarse: Size, patches: Tensor, first: int) -> None:
    """Fill `patches` with the patches of the lines (n, H, W) of positions, starting with line `first`."""
    _, h, w, d, c = volume.shape
    num_lines = len(patches) // coarse[2]
    _cut((h, w, d), coarse, c)(
        min(num_lines, _PIECES_OF_THREAD * torch.get_num_threads()), first, num_lines, volume, patches
    )


def lay(patches: Tensor, coarse: Size, volume: Tensor, bias: Tensor | None) -> None:
    """Fill `volume` with the sums of overlapping patches, plus the bias."""
    n, h, w, d, c = volume.shape
    num_pieces = min(n * h * w, _PIECES_OF_THREAD * torch.get_num_threads())
    _lay((h, w, d), coarse, c, bias is not None)(num_pieces, n, patches, volume, 0 if bias is None else bias)


@machine_code
def _cut(fine: Size, coarse: Size, c: int) -> Code:
    code = Code(num_arguments=4)
    first, num_lines, volume, patches = code.arguments
    volume, patches = code.pointer(volume, FLOAT), code.pointer(patches, FLOAT)
    taps = number(KERNEL)
    with code.every_piece() as piece, code.loop(*code.share(num_lines, piece)) as line:
        rest, y = _divided(code, code.plus(first, line), coarse[1])
        sample, x = _divided(code, rest, coarse[0])
        with code.loop(number(0), taps) as a, code.loop(number(0), taps) as b:
            i, i_in = _fine(code, x, a, fine[0])
            j, j_in = _fine(code, y, b, fine[1])
            source = _place(code, (sample, i, j), fine)
            line_in = code.ir.and_(i_in, j_in)
            run = code.plus(code.times(a, KERNEL), b)
            with code.loop(number(0), number(coarse[2])) as z:
                row = code.plus(code.times(line, coarse[2]), z)
                target = code.times(code.plus(code.times(row, KERNEL**2), run), KERNEL)
                for tap in range(KERNEL):
                    k, k_in = _fine(code, z, number(tap), fine[2])
                    inside = code.ir.and_(line_in, k_in)
                    start = code.ir.select(inside, code.times(code.plus(source, k), c), number(0))
                    to = code.times(code.plus(target, number(tap)), c)

                    def move(
                        at: Value, width: int, inside: Value = inside, start: Value = start, to: Value = to
                    ) -> None:
                        value = code.vector(volume, code.plus(start, at), width)
                        value = code.ir.select(inside, value, code.spread(FLOAT(0.0), width))
                        code.store_vector(value, patches, code.plus(to, at))

                    _every_vector(code, c, move)
    return code


@machine_code
def _lay(fine: Size, coarse: Size, c: int, has_bias: bool) -> Code:
    code = Code(num_arguments=4)
    num_samples, patches, volume, bias = code.arguments
    patches, volume, bias = (code.pointer(address, FLOAT) for address in (patches, volume, bias))
    num_lines = code.times(num_samples, fine[0] * fine[1])
    with code.every_piece() as piece, code.loop(*code.share(num_lines, piece)) as line:
        rest, j = _divided(code, line, fine[1])
        sample, i = _divided(code, rest, fine[0])
        of_line = [_coarse(code, i, coarse[0]), _coarse(code, j, coarse[1])]
        with code.loop(number(0), number(fine[2])) as k:
            of_number = [*of_line, _coarse(code, k, coarse[2])]
            found = []
            for (x, a, x_in), (y, b, y_in), (z, tap, z_in) in itertools.product(*of_number):
                inside = code.ir.and_(code.ir.and_(x_in, y_in), z_in)
                row = code.plus(_place(code, (sample, x, y), coarse), z)
                within = code.plus(code.times(code.plus(code.times(a, KERNEL), b), KERNEL), tap)
                start = code.times(code.plus(code.times(row, KERNEL**3), within), c)
                found.append((inside, code.ir.select(inside, start, number(0))))
            to = code.times(code.plus(code.times(line, fine[2]), k), c)

            def add(at: Value, width: int, found: list[tuple[Value, Value]] = found, to: Value = to) -> None:
                zero = code.spread(FLOAT(0.0), width)
                total = code.vector(bias, at, width) if has_bias else zero
                for inside, start in found:
                    value = code.vector(patches, code.plus(start, at), width)
                    total = code.ir.fadd(total, code.ir.select(inside, value, zero))
                code.store_vector(total, volume, code.plus(to, at))

            _every_vector(code, c, add)
    return code


def _fine(code: Code, coarse: Value, tap: Value, size: int) -> tuple[Value, Value]:
    """Return the place in the volume that a patch's value comes from, and whether it is inside the volume."""
    at = code.ir.sub(code.plus(code.times(coarse, 2), tap), number(1))
    return at, code.ir.icmp_unsigned("<", at, number(size))


def _coarse(code: Code, fine: Value, size: int) -> list[tuple[Value, Value, Value]]:
    """Return (patch, its tap, whether the patch exists) for the two patches along an axis that cover this value."""
    after = code.plus(fine, number(1))
    tap, patch = code.ir.and_(after, number(1)), code.ir.lshr(after, number(1))
    found = []
    for back in range(2):
        at = code.ir.sub(patch, number(back))
        found.append((at, code.plus(tap, number(2 * back)), code.ir.icmp_unsigned("<", at, number(size))))
    return found


def _divided(code: Code, value: Value, by: int) -> tuple[Value, Value]:
    """Return (quotient, remainder)."""
    return code.ir.udiv(value, number(by)), code.ir.urem(value, number(by))


def _place(code: Code, line: tuple[Value, Value, Value], size: Size) -> Value:
    """Return the index of the first position of a line (n, x, y)."""
    sample, x, y = line
    return code.times(code.plus(code.times(code.plus(code.times(sample, size[0]), x), size[1]), y), size[2])


def _every_vector(code: Code, c: int, do: "Callable[[Value, int], None]") -> None:
    """Call `do` for `c` values, full vectors first."""
    whole = c - c % WIDTH
    if whole:
        with code.loop(number(0), number(whole), WIDTH) as at:
            do(at, WIDTH)
    width = WIDTH
    while whole < c:
        width //= 2
        if c - whole >= width:
            do(number(whole), width)
            whole += width
