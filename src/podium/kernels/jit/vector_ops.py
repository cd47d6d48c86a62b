"""Vector operations for routines of machine code, beyond sums and products: exponentials, random numbers, small matrix
products and transposes. Used by `kernels/transformer/attention.py`, `kernels/transformer/dropout_gelu.py` and
`kernels/transformer/cross_entropy.py`.

Written by hand because LLVM has no such vector functions without an additional library.
"""

import math
from collections.abc import Callable, Sequence

import torch
from llvmlite import ir

from podium.kernels.jit.llvm import FLOAT, INT, WIDTH, Code, Value, number

#: sums of a matrix product that stay in registers: this many rows by this many vectors
_ROWS, _VECTORS = (12 if WIDTH == 16 else 6), 2
#: columns of one step of a matrix product
PANEL = _VECTORS * WIDTH
_INTS = ir.VectorType(INT, WIDTH)
_FLOATS = ir.VectorType(FLOAT, WIDTH)
#: ln 2 in two parts, the first with so few bits that its multiples are exact
_LN2_HIGH = round(math.log(2) * 512) / 512
_LN2_LOW = math.log(2) - _LN2_HIGH
#: adding this to a float and subtracting it again rounds to an integer, which the sum holds in its lowest bits
_ROUNDS = 1.5 * 2**23
#: e to this power or less counts as zero
_LEAST_POWER = -87.0


def constant(value: float) -> Value:
    return ir.Constant(_FLOATS, [value] * WIDTH)


def whole(value: int) -> Value:
    """Return a vector of 32-bit integers."""
    return ir.Constant(_INTS, [value & 0xFFFFFFFF] * WIDTH)


def exponential(code: Code, x: Value) -> Value:
    """Return e^x for x up to 88: zero below -87, NaN where x is NaN. The relative error is at most 1e-7."""
    build = code.ir
    shifted = code.multiply_add(x, constant(1 / math.log(2)), constant(_ROUNDS))
    power = build.sub(build.bitcast(shifted, _INTS), whole(0x4B400000))  # the bits of _ROUNDS
    turns = build.fsub(shifted, constant(_ROUNDS))
    rest = code.multiply_add(turns, constant(-_LN2_HIGH), x)
    rest = code.multiply_add(turns, constant(-_LN2_LOW), rest)  # within ± ln 2 / 2: its series converges quickly
    total = constant(1 / math.factorial(7))
    for k in range(6, -1, -1):
        total = code.multiply_add(total, rest, constant(1 / math.factorial(k)))
    scale = build.bitcast(build.shl(build.add(power, whole(127)), whole(23)), _FLOATS)
    small = build.fcmp_ordered("<", x, constant(_LEAST_POWER))
    return build.select(small, constant(0.0), build.fmul(total, scale))


# --- random numbers ---------------------------------------------------------------------------------------------------


def draw_seed() -> int:
    """Draw 64 bits from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))


def threshold(share: float) -> int:
    """Return the number that `kept` compares with to drop this share."""
    return min(round(share * 2**32), 2**32 - 1)


def line_key(code: Code, seed: Value, line: Value) -> tuple[Value, Value]:
    """Return two vectors that determine the draws of one line, from a seed and the line's number, each of 64 bits."""
    build = code.ir
    x = build.add(seed, build.mul(line, number(0x9E3779B97F4A7C15 - 2**64)))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = build.mul(build.xor(x, build.lshr(x, number(shift))), number(factor - 2**64))
    x = build.xor(x, build.lshr(x, number(31)))
    high = build.trunc(build.lshr(x, number(32)), INT)
    return code.spread(build.trunc(x, INT), WIDTH), code.spread(high, WIDTH)


def kept(code: Code, key: tuple[Value, Value], place: Value, least: int) -> Value:
    """Return which of the values from `place` on in a line are kept: those whose 32 random bits are at least `least`.

    The bits are a hash of the place, mixed with the key twice: they depend only on seed, line and place.
    """
    build = code.ir
    lanes = ir.Constant(_INTS, list(range(WIDTH)))
    x = build.add(code.spread(build.trunc(place, INT), WIDTH), lanes)
    x = build.add(build.mul(x, whole(0x9E3779B1)), key[0])
    x = build.mul(build.xor(x, build.lshr(x, whole(16))), whole(0x21F0AAAD))
    x = build.add(build.xor(x, build.lshr(x, whole(15))), key[1])
    x = build.mul(build.xor(x, build.lshr(x, whole(13))), whole(0x735A2D97))
    x = build.xor(x, build.lshr(x, whole(15)))
    return build.icmp_unsigned(">=", x, whole(least))


# --- across the lanes of a vector -------------------------------------------------------------------------------------


def across(code: Code, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Combine all elements with `join`, always in the same order."""
    size = vector.type.count
    while size > 1:
        size //= 2
        places = ir.Constant(ir.VectorType(INT, WIDTH), [(k + size) % WIDTH for k in range(WIDTH)])
        vector = join(vector, code.ir.shuffle_vector(vector, vector, places))
    return code.ir.extract_element(vector, ir.Constant(INT, 0))


def larger(code: Code, left: Value, right: Value) -> Value:
    return code.ir.select(code.ir.fcmp_ordered(">", left, right), left, right)


def transposed(code: Code, rows: Sequence[Value]) -> list[Value]:
    """Return the transpose of WIDTH vectors."""
    rows, half = list(rows), WIDTH // 2
    while half:
        found = list(rows)
        for i in range(WIDTH):
            if not i & half:
                first, second = rows[i], rows[i + half]
                low = [k if not k & half else WIDTH + k - half for k in range(WIDTH)]
                high = [k + half if not k & half else WIDTH + k for k in range(WIDTH)]
                for target, places in ((i, low), (i + half, high)):
                    found[target] = code.ir.shuffle_vector(
                        first, second, ir.Constant(ir.VectorType(INT, WIDTH), places)
                    )
        rows, half = found, half // 2
    return rows


def transpose(
    code: Code, num_rows: int, num_columns: int, source: Value, source_stride: int, target: Value, target_stride: int
) -> None:
    """Transpose source (rows, columns) into target (columns, rows); both sizes are multiples of WIDTH."""
    with (
        code.loop(number(0), number(num_rows), WIDTH) as row,
        code.loop(number(0), number(num_columns), WIDTH) as column,
    ):
        rows = [code.vector(source, _place(code, row, i, source_stride, column), WIDTH) for i in range(WIDTH)]
        for i, vector in enumerate(transposed(code, rows)):
            code.store_vector(vector, target, _place(code, column, i, target_stride, row))


def copy(
    code: Code, num_rows: int, num_columns: int, source: Value, source_stride: int, target: Value, target_stride: int
) -> None:
    with (
        code.loop(number(0), number(num_rows)) as row,
        code.loop(number(0), number(num_columns), WIDTH) as column,
    ):
        vector = code.vector(source, _place(code, row, 0, source_stride, column), WIDTH)
        code.store_vector(vector, target, _place(code, row, 0, target_stride, column))


def _place(code: Code, row: Value, i: int, stride: int, column: Value) -> Value:
    return code.plus(code.times(code.plus(row, number(i)), stride), column)


# --- matrix products --------------------------------------------------------------------------------------------------


def multiply(
    code: Code,
    num_rows: int,
    num_inner: Value | int,
    num_columns: Value | int,
    left: tuple[Value, int, int],
    right: tuple[Value, int],
    target: tuple[Value, int],
    *,
    onto: bool = False,
    factors: Value | None = None,
) -> None:
    """Set target (rows, columns) to left (rows, inner) · right (inner, columns), or add the product to it.

    A matrix is a pointer and a row stride; `left` has a column stride too. A number of columns known in advance is a
    multiple of WIDTH, any other a multiple of PANEL; an inner size not known in advance is a multiple of 4. `factors`:
    one for each row.
    """
    if isinstance(num_columns, int):
        rest = num_columns % PANEL
        paired = number(num_columns - rest)
    else:
        rest, paired = 0, num_columns
    num_steps, num_turns = 4, number(0)
    if isinstance(num_inner, int):
        num_steps = next(steps for steps in (4, 3, 2, 1) if num_inner % steps == 0)
        num_turns = number(num_inner // num_steps)
    else:
        num_turns = code.ir.lshr(num_inner, number(2))
    small, num_larger = divmod(num_rows, -(-num_rows // _ROWS))

    def groups(column: Value, num_vectors: int) -> None:
        first = num_larger * (small + 1)
        for rows, start, stop in ((small + 1, 0, first), (small, first, num_rows)):
            if start < stop:
                with code.loop(number(start), number(stop), rows) as row:
                    block(row, rows, column, num_vectors)

    def block(row: Value, rows: int, column: Value, num_vectors: int) -> None:
        places = [
            code.plus(_place(code, row, i, target[1], column), number(k * WIDTH))
            for i in range(rows)
            for k in range(num_vectors)
        ]
        start = [code.vector(target[0], at, WIDTH) if onto else constant(0.0) for at in places]

        def several(turns: Value, sums: list[Value]) -> list[Value]:
            for step in range(num_steps):
                sums = turn(code.plus(code.times(turns, num_steps), number(step)), sums)
            return sums

        def turn(inner: Value, sums: list[Value]) -> list[Value]:
            line = code.plus(code.times(inner, right[1]), column)
            others = [code.vector(right[0], code.plus(line, number(k * WIDTH)), WIDTH) for k in range(num_vectors)]
            found = []
            for i in range(rows):
                at = code.plus(code.times(code.plus(row, number(i)), left[1]), code.times(inner, left[2]))
                factor = code.spread(code.load(left[0], at), WIDTH)
                found += [code.multiply_add(factor, other, sums[i * num_vectors + k]) for k, other in enumerate(others)]
            return found

        totals = code.fold(num_turns, start, several)
        for k, (at, total) in enumerate(zip(places, totals, strict=True)):
            if factors is not None:
                factor = code.load(factors, code.plus(row, number(k // num_vectors)))
                total = code.ir.fmul(total, code.spread(factor, WIDTH))
            code.store_vector(total, target[0], at)

    with code.loop(number(0), paired, PANEL) as column:
        groups(column, _VECTORS)
    if rest:
        groups(paired, 1)


def scratch_arrays(code: Code, scratch: Value, piece: Value, sizes: dict[str, int]) -> dict[str, Value]:
    """Return a piece's own arrays of floats by name."""
    arrays, at = {}, 0
    for name, size in sizes.items():
        start = code.plus(code.times(piece, scratch_size(sizes)), number(at))
        arrays[name] = code.pointer(scratch, FLOAT, start)
        at += -(-size // WIDTH) * WIDTH
    return arrays


def scratch_size(sizes: dict[str, int]) -> int:
    """Return the floats of all arrays of a piece, padded so that no two threads write to the same cache line."""
    return sum(-(-size // WIDTH) * WIDTH for size in sizes.values()) + 2 * WIDTH
