"""The inverse cosine transform of a block, in the fixed-point numbers that make decoders agree to the bit.

libjpeg-turbo computes parts of it in 16 bits, how exactly depends on the processor. Where a sum would not fit, which no
encoder brings about, that is reported, and the library decides. Called by `entropy.py`.
"""

import math

from llvmlite import ir
from numba import types

from podium.data.images.jpeg.code_tables import Value
from podium.machine.numba_loops import intrinsic

_FRACTION_BITS = 13  # of the transform's factors
_EXTRA_BITS = 2  # kept between its two directions
_LARGEST_BITS = 14  # of the magnitude of what is between its two directions: two of these are added in 16 bits
_LONG = ir.IntType(64)


@intrinsic
def inverse_dct(context: Value, block: Value, samples: Value, stride: Value) -> Value:
    """Turn 64 coefficients (int16) at `block` into 8 rows of 8 bytes at `samples`, and the block into zeros.

    Return 0, or another number if decoders may disagree about this block.
    """

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        block, samples, stride = args
        short, wide, byte = (ir.VectorType(ir.IntType(bits), 8) for bits in (16, 32, 8))
        rows = []
        for row in range(8):
            place = b.inttoptr(b.add(block, ir.Constant(_LONG, 16 * row)), short.as_pointer())
            rows.append(b.sext(b.load(place, align=16), wide))
            b.store(ir.Constant(short, [0] * 8), place, align=16)
        rows = _one_direction(b, rows, _FRACTION_BITS - _EXTRA_BITS)
        beyond = _beyond(b, rows)
        columns = _one_direction(b, _transposed(b, rows), _FRACTION_BITS + _EXTRA_BITS + 3)
        least, most, middle = (ir.Constant(wide, [value] * 8) for value in (0, 255, 128))
        limited = []
        for column in columns:
            value = b.add(column, middle)
            value = b.select(b.icmp_signed(">", value, least), value, least)
            limited.append(b.select(b.icmp_signed("<", value, most), value, most))
        for row, values in enumerate(_transposed(b, limited)):
            place = b.add(samples, b.mul(stride, ir.Constant(_LONG, row)))
            b.store(b.trunc(values, byte), b.inttoptr(place, byte.as_pointer()), align=1)
        return beyond

    return types.uint64(*[types.uint64] * 3), code


def _beyond(b: ir.IRBuilder, rows: list[Value]) -> Value:
    """Return whether one of the numbers has more than _LARGEST_BITS bits and a sign, as a 64-bit number."""
    kind = rows[0].type
    offset = ir.Constant(kind, [1 << _LARGEST_BITS] * 8)
    together = b.add(rows[0], offset)
    for row in rows[1:]:
        together = b.or_(together, b.add(row, offset))
    high = b.lshr(together, ir.Constant(kind, [_LARGEST_BITS + 1] * 8))
    whole = ir.IntType(8 * 32)
    return b.zext(b.icmp_unsigned("!=", b.bitcast(high, whole), ir.Constant(whole, 0)), _LONG)


def _one_direction(b: ir.IRBuilder, x: list[Value], shift: int) -> list[Value]:
    """Turn eight vectors of coefficients into eight of samples: Loeffler, Ligtenberg and Moschytz's factorisation."""

    def constant(value: int) -> Value:
        return ir.Constant(x[0].type, [value] * 8)

    def times(value: Value, factor: float) -> Value:
        return b.mul(value, constant(round(factor * math.sqrt(2) * (1 << _FRACTION_BITS))))

    c1, c2, c3, c5, c6, c7 = (math.cos(k * math.pi / 16) for k in (1, 2, 3, 5, 6, 7))
    shared = times(b.add(x[2], x[6]), c6)
    low, high = b.add(shared, times(x[6], -c2 - c6)), b.add(shared, times(x[2], c2 - c6))
    rounding = constant(1 << (shift - 1))
    total, difference = (
        b.add(b.shl(value, constant(_FRACTION_BITS)), rounding) for value in (b.add(x[0], x[4]), b.sub(x[0], x[4]))
    )
    even = [b.add(total, high), b.add(difference, low), b.sub(difference, low), b.sub(total, high)]
    z1, z2 = times(b.add(x[7], x[1]), c7 - c3), times(b.add(x[5], x[3]), -c1 - c3)
    z3, z4 = b.add(x[7], x[3]), b.add(x[5], x[1])
    z5 = times(b.add(z3, z4), c3)
    z3, z4 = b.add(times(z3, -c3 - c5), z5), b.add(times(z4, c5 - c3), z5)
    odd = [
        b.add(times(x[1], c1 + c3 - c5 - c7), b.add(z1, z4)),
        b.add(times(x[3], c1 + c3 + c5 - c7), b.add(z2, z3)),
        b.add(times(x[5], c1 + c3 - c5 + c7), b.add(z2, z4)),
        b.add(times(x[7], -c1 + c3 + c5 - c7), b.add(z1, z3)),
    ]
    sums = [b.add(*both) for both in zip(even, odd, strict=True)]
    differences = [b.sub(*both) for both in zip(even, odd, strict=True)]
    return [b.ashr(value, constant(shift)) for value in (*sums, *reversed(differences))]


def _transposed(b: ir.IRBuilder, rows: list[Value]) -> list[Value]:
    """Exchange rows and columns: blocks of 4, of 2, then single values."""
    for step in (4, 2, 1):
        low = [i if i & step == 0 else 8 + i - step for i in range(8)]
        high = [i + step if i & step == 0 else 8 + i for i in range(8)]
        transposed = list(rows)
        for at in range(8):
            if at & step == 0:
                transposed[at] = shuffle(b, rows[at], rows[at + step], low)
                transposed[at + step] = shuffle(b, rows[at], rows[at + step], high)
        rows = transposed
    return rows


def shuffle(b: ir.IRBuilder, left: Value, right: Value, places: list[int]) -> Value:
    """Return the values at `places` of two vectors put together."""
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))
