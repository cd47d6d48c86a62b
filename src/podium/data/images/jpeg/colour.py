"""From samples of luma and chroma to RGB, equal to the bit to libjpeg-turbo. Called by `window.py`.

Chroma with fewer samples is interpolated from the nearest two or four, 3 : 1 in each direction. Sixteen pixels at a
time, in registers that LLVM chooses: numba computes in 64 bits, which takes five times as long.
"""

import numpy as np
from llvmlite import ir
from numba import types

from podium.data.images.jpeg.code_tables import Value
from podium.data.images.jpeg.inverse_dct import shuffle
from podium.machine.numba_loops import compiled, intrinsic

_SIZE = 16  # of a vector
#: elements at the end of arrays that are read or written with the last ones
ROOM = 3 * _SIZE
_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)
_SHORTS, _WIDE = ir.VectorType(_SHORT, _SIZE), ir.VectorType(ir.IntType(32), _SIZE)


def _constant(kind: Value, value: int) -> Value:
    return ir.Constant(kind, [value] * _SIZE)


def _at(b: ir.IRBuilder, address: Value, kind: ir.Type, num_bytes: int = 0) -> Value:
    place = b.add(address, ir.Constant(address.type, num_bytes))
    return b.inttoptr(place, ir.VectorType(kind, _SIZE).as_pointer())


def _spread(b: ir.IRBuilder, value: Value) -> Value:
    first = b.insert_element(_constant(_SHORTS, 0), b.trunc(value, _SHORT), ir.Constant(ir.IntType(32), 0))
    return shuffle(b, first, first, [0] * _SIZE)


@intrinsic
def _add_rows(context: Value, near: Value, weight: Value, far: Value, into: Value) -> Value:
    """Write `weight` · sixteen samples + those of another row, as int16."""

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        near, weight, far, into = args
        rows = [b.zext(b.load(_at(b, row, _BYTE), align=1), _SHORTS) for row in (near, far)]
        b.store(b.add(b.mul(rows[0], _spread(b, weight)), rows[1]), _at(b, into, _SHORT), align=2)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 4), code


@intrinsic
def _widen(context: Value, line: Value, onto: Value, low: Value, high: Value, shift: Value) -> Value:
    """Write thirty-two values from the middle sixteen of eighteen, two for each: (3 · this + the one before + low) >>
    shift, then (3 · this + the one after + high) >> shift."""

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        line, onto, low, high, shift = args
        before, own, after = (b.load(_at(b, line, _SHORT, 2 * place), align=2) for place in range(3))
        own = b.mul(own, _constant(_SHORTS, 3))
        even, odd = (
            b.lshr(b.add(b.add(own, other), _spread(b, rounding)), _spread(b, shift))
            for other, rounding in ((before, low), (after, high))
        )
        for half in range(2):
            places = [_SIZE * (i % 2) + (half * _SIZE + i) // 2 for i in range(_SIZE)]
            b.store(shuffle(b, even, odd, places), _at(b, onto, _SHORT, 2 * _SIZE * half), align=2)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 5), code


@intrinsic
def _mix(context: Value, luma: Value, blues: Value, reds: Value, out: Value) -> Value:
    """Write RGB of sixteen pixels. Factors: 1.402, 0.34414, 0.71414 and 1.772 times 2^16, less what is added whole."""

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        luma, blues, reds, out = args

        def product(value: Value, factor: int) -> Value:
            """Return (value · factor + 2^15) >> 16, for factors of 15 bits and a sign: the upper half of a product."""
            doubled = b.sext(b.shl(value, _constant(_SHORTS, 1)), _WIDE)
            high = b.trunc(b.ashr(b.mul(doubled, _constant(_WIDE, factor)), _constant(_WIDE, 16)), _SHORTS)
            return b.ashr(b.add(high, _constant(_SHORTS, 1)), _constant(_SHORTS, 1))

        y = b.zext(b.load(_at(b, luma, _BYTE), align=1), _SHORTS)
        blue, red = (b.sub(b.load(_at(b, of, _SHORT), align=2), _constant(_SHORTS, 128)) for of in (blues, reds))
        both = b.add(
            b.mul(b.sext(blue, _WIDE), _constant(_WIDE, -22554)),
            b.mul(b.sext(red, _WIDE), _constant(_WIDE, 65536 - 46802)),
        )
        both = b.trunc(b.ashr(b.add(both, _constant(_WIDE, 1 << 15)), _constant(_WIDE, 16)), _SHORTS)
        colours = [
            b.add(b.add(y, red), product(red, 91881 - 65536)),
            b.add(b.sub(y, red), both),
            b.add(b.add(y, b.shl(blue, _constant(_SHORTS, 1))), product(blue, 116130 - 2 * 65536)),
        ]
        limited = []
        for colour in colours:
            value = b.select(b.icmp_signed(">", colour, _constant(_SHORTS, 0)), colour, _constant(_SHORTS, 0))
            value = b.select(b.icmp_signed("<", value, _constant(_SHORTS, 255)), value, _constant(_SHORTS, 255))
            limited.append(b.trunc(value, ir.VectorType(_BYTE, _SIZE)))
        first_two = shuffle(b, limited[0], limited[1], list(range(2 * _SIZE)))
        third = shuffle(b, limited[2], limited[2], list(range(2 * _SIZE)))
        for part in range(3):
            places = [_SIZE * (i % 3) + i // 3 for i in range(part * _SIZE, (part + 1) * _SIZE)]
            b.store(shuffle(b, first_two, third, places), _at(b, out, _BYTE, part * _SIZE), align=1)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 4), code


def work_sizes(left: int, width: int, across: int) -> tuple[int, int]:
    """Return how many int16 numbers `lines` and `wide` of `convert_to_rgb` hold."""
    room = (left + width - 1) // across + 1 - left // across + ROOM
    return room, 4 * room


@compiled(error_model="numpy")
def convert_to_rgb(
    planes: Value,
    sampling: Value,
    corner: Value,
    limits: Value,
    window: Value,
    lines: Value,
    wide: Value,
    out: Value,
) -> None:
    """Write RGB of a window (top, left, height, width) into the flat `out`, row after row.

    `sampling`: pixels (across, down) for each sample of chroma; `corner`: the first row and column of the planes, in
    samples of chroma; `limits`: how many rows and columns of these the image has. Planes and `out` have ROOM at their
    ends; `lines` and `wide` are work space of `work_sizes` numbers."""
    luma, blue, red = planes
    (across, down), (top, left, height, width) = sampling, window
    first, stop = left // across, (left + width - 1) // across + 1
    # Samples of the image from one before the first to one after the last; at its edges, they are repeated.
    start, end = max(first - 1, 0), min(stop + 1, limits[1])
    edge = 1 if first == 0 else 0
    room = stop - first + ROOM
    lines[:room] = 0
    lines_at, wide_at = np.uint64(lines.ctypes.data), np.uint64(wide.ctypes.data)
    low, high, shift = (8, 7, 4) if down == 2 else (1, 2, 2)
    for row in range(height):
        own = (top + row) // down
        beside = own if down == 1 else min(max(own + 1 if (top + row) % 2 else own - 1, 0), limits[0] - 1)
        for colour in range(2):
            plane = blue if colour == 0 else red
            samples, stride = np.uint64(plane.ctypes.data), plane.shape[1]
            onto = wide_at + np.uint64(4 * room * colour)
            if across == 1:
                near = samples + np.uint64((own - corner[0]) * stride + left - corner[1])
                for x in range(0, width, _SIZE):
                    _add_rows(near + np.uint64(x), np.uint64(0), near + np.uint64(x), onto + np.uint64(2 * x))
                continue
            near = samples + np.uint64((own - corner[0]) * stride + start - corner[1])
            far = samples + np.uint64((beside - corner[0]) * stride + start - corner[1])
            weight = np.uint64(3 if down == 2 else 0)
            for x in range(0, end - start, _SIZE):
                into = lines_at + np.uint64(2 * (edge + x))
                _add_rows(near + np.uint64(x), weight, far + np.uint64(x), into)
            if edge == 1:
                lines[0] = lines[1]
            if stop + 1 > limits[1]:
                lines[edge + end - start] = lines[edge + end - start - 1]
            for x in range(0, stop - first, _SIZE):
                line, widened = lines_at + np.uint64(2 * x), onto + np.uint64(4 * x)
                _widen(line, widened, np.uint64(low), np.uint64(high), np.uint64(shift))
        place = (top + row - corner[0] * down) * luma.shape[1] + left - corner[1] * across
        source, target = np.uint64(luma.ctypes.data) + np.uint64(place), np.uint64(out.ctypes.data)
        blues = wide_at + np.uint64(2 * (left - first * across))
        reds = blues + np.uint64(4 * room)
        target += np.uint64(row * width * 3)
        for x in range(0, width, _SIZE):
            _mix(source + np.uint64(x), blues + np.uint64(2 * x), reds + np.uint64(2 * x), target + np.uint64(3 * x))
