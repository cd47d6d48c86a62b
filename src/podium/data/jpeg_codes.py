"""From the codes of a JPEG's scan to samples of a part of it, equal to the bit to what libjpeg-turbo makes of them.

Reading the codes, one after the other from the first, is most of the work of decoding. The next code cannot be found
before this one's length is known, so tables look at twelve bits at once:

    of blocks that are wanted    `ahead`: the bits of up to two codes with their values; `pairs`: what they mean, which
                                 is looked up while the next two are found
    of all others                `passed` and `steps`: bits and coefficients of as many codes as fit

Codes that are longer are looked up by themselves. Written here because no library passes over what is not wanted.
Called by `jpeg_window.py`.
"""

import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from podium.data.loops import compiled, intrinsic

_BITS = 12  # of an index into the tables of codes
_REST = 64  # a run to the end of the block
_ENDED = 128  # added to the steps of codes of which the last is such a run
_MOST_BITS = 11  # of the value of a first coefficient of 8-bit images
#: bytes after the last that may be read: those of six blocks of the longest codes
SPARE_BYTES = 2048
#: places of coefficients, which come in diagonals of the block, turning back at its edges
_NATURAL = np.array(
    sorted(range(64), key=lambda at: (sum(divmod(at, 8)), at // 8 if sum(divmod(at, 8)) % 2 else at % 8)), np.uint8
)
_LONG = ir.IntType(64)

Kind = Any  # of numba's and llvmlite's values, which a type checker knows nothing of


class Codes(NamedTuple):
    """How codes are read. Tables of twelve bits of brightness are followed by those of colour; of `short` and what
    follows it, the first two are of first coefficients, the others of all others."""

    #: bits of the next two codes and their values, or of one; 0 where it is longer
    ahead: NDArray[np.uint8]
    #: bits of the first | run << 8 | value << 16 | run of the second << 32 | whether there is one << 40 | value << 48
    pairs: NDArray[np.uint64]
    #: bits of all codes and values that fit, up to the end of the block
    passed: NDArray[np.uint8]
    #: how many coefficients these are; _REST where there are none, or too many for a block
    steps: NDArray[np.uint8]
    #: bits | symbol << 8 of a code alone; 0 where it is longer
    short: NDArray[np.int32]
    #: (4, 17): codes of this many bits, aligned to 16, are below
    limits: NDArray[np.int64]
    #: (4, 17): where the symbols of codes of this many bits are, less the first of these codes
    bases: NDArray[np.int64]
    #: (4, 256)
    symbols: NDArray[np.uint8]


@functools.lru_cache(maxsize=64)
def codes_of(tables: tuple[bytes, bytes, bytes, bytes]) -> Codes | None:
    """Of the tables as they are in a file: 16 counts of codes by their length, then the symbols. None if they are not
    consistent. Most images have the same ones."""
    size = 1 << _BITS
    short, limits, bases = np.zeros((4, size), np.int32), np.zeros((4, 17), np.int64), np.zeros((4, 17), np.int64)
    symbols = np.zeros((4, 256), np.uint8)
    for table, kind in zip(tables, (0, 2, 1, 3), strict=True):
        given = np.frombuffer(table, np.uint8)
        num_symbols = len(given) - 16
        if num_symbols != sum(table[:16]) or num_symbols > 256:
            return None
        symbols[kind, :num_symbols] = given[16:]
        if not _place_codes(given, short[kind], limits[kind], bases[kind]):
            return None
    ahead, passed, steps = (np.zeros((2, size), np.uint8) for _ in range(3))
    pairs = np.zeros((2, size), np.uint64)
    for colour in range(2):
        _fill(short[2 + colour], ahead[colour], pairs[colour], passed[colour], steps[colour])
    return Codes(
        ahead.reshape(-1), pairs.reshape(-1), passed.reshape(-1), steps.reshape(-1), short.reshape(-1),
        limits, bases, symbols,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def quanta_of(tables: tuple[bytes, ...]) -> NDArray[np.int32]:
    """Of tables as they are in a file, one after the other: each has 64 numbers of one byte or two."""
    return np.concatenate([np.frombuffer(table, ">u2" if len(table) > 64 else "u1") for table in tables]).astype("i4")


@compiled(error_model="numpy")
def _place_codes(given: Kind, short: Kind, limits: Kind, bases: Kind) -> Kind:
    """Codes follow one another, shorter ones first. False where there are more than there is room for."""
    code = first = 0
    for length in range(1, 17):
        count = int(given[length - 1])
        if code + count > 1 << length:
            return False
        bases[length] = first - code
        if length <= _BITS:
            span = 1 << (_BITS - length)
            for number in range(count):
                entry = np.int32(given[16 + first + number]) << 8 | length
                short[(code + number) * span : (code + number + 1) * span] = entry
        code, first = code + count, first + count
        limits[length] = code << (16 - length)
        code <<= 1
    return True


@compiled(error_model="numpy")
def _fill(short: Kind, ahead: Kind, pairs: Kind, passed: Kind, steps: Kind) -> None:
    """Tables of codes with their values, from that of codes alone."""
    size = len(short)
    values = np.zeros(size, np.int64)  # bits | run << 8 | value << 16
    for index in range(size):
        length, symbol = short[index] & 255, short[index] >> 8
        run, extra = symbol >> 4, symbol & 15
        if length == 0 or length + extra > _BITS:
            continue
        if extra == 0:
            values[index] = length | (run if run == 15 else _REST) << 8
            continue
        value = (index >> (_BITS - length - extra)) & ((1 << extra) - 1)
        if value < 1 << (extra - 1):
            value -= (1 << extra) - 1
        values[index] = (length + extra) | run << 8 | (value & 0xFFFF) << 16
    for index in range(size):
        pair = values[index]
        bits = pair & 255
        if bits != 0 and (pair >> 8) & 255 != _REST:
            second = values[(index << bits) & (size - 1)]
            if second != 0 and bits + (second & 255) <= _BITS:
                bits += second & 255
                pair |= ((second >> 8) & 255) << 32 | 1 << 40 | (second >> 16) << 48
        ahead[index], pairs[index] = bits, np.uint64(pair)
        bits = step = ended = 0
        while ended == 0:
            value = values[(index << bits) & (size - 1)]
            if value == 0 or bits + (value & 255) > _BITS:
                break
            bits += value & 255
            if (value >> 8) & 255 == _REST:
                ended = _ENDED
            else:
                step += ((value >> 8) & 255) + 1
        passed[index] = bits
        steps[index] = (step if bits != 0 and step < _REST else _REST) + ended


# ------------------------------------------------------------------------------------------------- codes


@intrinsic
def _load(context: Kind, address: Kind) -> Kind:
    """Eight bytes, the first of them the highest."""

    def code(context: Kind, b: ir.IRBuilder, signature: Kind, args: Kind) -> Kind:
        return _first_highest(b, b.load(b.inttoptr(args[0], _LONG.as_pointer()), align=1))

    return types.uint64(types.uint64), code


@intrinsic
def _store(context: Kind, address: Kind, word: Kind) -> Kind:
    """The inverse."""

    def code(context: Kind, b: ir.IRBuilder, signature: Kind, args: Kind) -> Kind:
        b.store(_first_highest(b, args[1]), b.inttoptr(args[0], _LONG.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), code


def _first_highest(b: ir.IRBuilder, word: Kind) -> Kind:
    """Bytes the other way round, where the machine begins with the lowest."""
    return b.bswap(word) if sys.byteorder == "little" else word


@compiled(error_model="numpy")
def unstuffed(data: Kind, start: Kind, stop: Kind, out: Kind) -> Kind:
    """data[start:stop] without the zeros that follow bytes of 255; how many bytes, -1 where a marker is among them."""
    ones, highs = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    source, target = np.uint64(data.ctypes.data), np.uint64(out.ctypes.data)
    one, eight = np.uint64(1), np.uint64(8)
    at, end, count = np.uint64(start), np.uint64(stop), np.uint64(0)
    while at < end:
        if at + eight <= end:
            word = _load(source + at)
            if (~word - ones) & word & highs == 0:  # no byte is 255
                _store(target + count, word)
                at += eight
                count += eight
                continue
        for _ in range(8):
            if at < end:
                value = data[at]
                out[count] = value
                at += one
                count += one
                if value == 255:
                    if at >= end or data[at] != 0:
                        return -1
                    at += one
    return np.int64(count)


@compiled(error_model="numpy")
def _symbol(word: Kind, kind: Kind, short: Kind, limits: Kind, bases: Kind, symbols: Kind) -> Kind:
    """(bits, symbol) of the code at the top of a word; no bits where there is none."""
    entry = short[(np.uint64(kind) << np.uint64(_BITS)) + (word >> np.uint64(64 - _BITS))]
    if entry != 0:
        return np.int64(entry & 255), np.int64(entry >> 8)
    code = np.int64(word >> np.uint64(48))
    for length in range(_BITS + 1, 17):
        if code < limits[kind, length]:
            return np.int64(length), np.int64(symbols[kind, bases[kind, length] + (code >> (16 - length))])
    return np.int64(0), np.int64(0)


@compiled(error_model="numpy")
def _value(word: Kind, length: Kind, extra: Kind) -> Kind:
    """That of `extra` bits behind the first `length` of a word."""
    if extra == 0:
        return np.int64(0)
    value = np.int64((word << np.uint64(length)) >> np.uint64(64 - extra))
    if value < 1 << (extra - 1):
        value -= (1 << extra) - 1
    return value


@compiled(error_model="numpy")
def _long_code(word: Kind, kind: Kind, short: Kind, limits: Kind, bases: Kind, symbols: Kind) -> Kind:
    """(bits, run, value) of a code and value of any length; no bits where there is none."""
    length, symbol = _symbol(word, kind, short, limits, bases, symbols)
    run, extra = symbol >> 4, symbol & 15
    if extra == 0 and run < 15:
        run = _REST
    return np.uint64(length + extra if length else 0), np.uint64(run), _value(word, length, extra)


@compiled(error_model="numpy")
def read_codes(
    bits: Kind, num_bits: Kind, codes: Kind, quanta: Kind, sampling: Kind, units: Kind, window: Kind, planes: Kind
) -> Kind:
    """Fills planes (brightness and two colours) with the samples of a window. False where the codes make no sense.

    A unit is `sampling` (across, down) blocks of brightness and one of each colour; the image has `units` (rows,
    columns); `window`: first row of units, the one after the last, first column, the one after the last. `bits` are
    those of the scan, then SPARE_BYTES of zeros."""
    ahead, pairs, passed, steps, short, limits, bases, symbols = codes
    (across, down), (num_rows, num_columns) = sampling, units
    row_start, row_stop, column_start, column_stop = window
    natural = _NATURAL
    block = np.zeros(64 + 16, np.int16)
    block_at = (np.uint64(block.ctypes.data) + np.uint64(31)) & ~np.uint64(31)
    coefficients = block[np.int64(block_at - np.uint64(block.ctypes.data)) >> 1 :]
    samples_at = np.array([plane.ctypes.data for plane in planes], np.uint64)
    strides = np.array([plane.shape[1] for plane in planes], np.uint64)
    source, place = np.uint64(bits.ctypes.data), np.uint64(0)
    one, three, seven, top = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(64 - _BITS)
    num_bright = across * down
    last = np.zeros(3, np.int64)
    for row in range(row_stop):
        for column in range(num_columns):
            if np.int64(place) > num_bits:
                return False
            if row == row_stop - 1 and column >= column_stop and row_stop < num_rows:
                return True
            inside = row >= row_start and column >= column_start and column < column_stop
            for number in range(num_bright + 2):
                component = 0 if number < num_bright else number - num_bright + 1
                kind = min(component, 1)
                table = np.uint64(kind) << np.uint64(_BITS)
                word = _load(source + (place >> three)) << (place & seven)
                length, extra = _symbol(word, kind, short, limits, bases, symbols)
                if length == 0 or extra > _MOST_BITS:
                    return False
                last[component] += _value(word, length, extra)
                place += np.uint64(length + extra)
                k = one
                if inside:
                    quantum = np.uint64(component) << np.uint64(6)
                    coefficients[0] = last[component] * quanta[quantum]
                    while k < 64:
                        word = _load(source + (place >> three)) << (place & seven)
                        known = True
                        for _ in range(4):  # 48 of the 57 bits that there are at least
                            index = table + (word >> top)
                            size = np.uint64(ahead[index])
                            pair = pairs[index]
                            if size == 0:
                                known = False
                                break
                            word <<= size
                            place += size
                            run = (pair >> np.uint64(8)) & np.uint64(255)
                            k += run
                            if k > 63:
                                if run != _REST:
                                    return False
                                break
                            coefficients[natural[k]] = np.int16(pair >> np.uint64(16)) * quanta[quantum + k]
                            k += one
                            if k > 63:  # the second is of another block
                                place -= size - (pair & np.uint64(255))
                                break
                            run = (pair >> np.uint64(32)) & np.uint64(127)
                            k += run
                            if k > 63:
                                if run != _REST:
                                    return False
                                break
                            # Where there is no second: a zero, which what comes next writes over.
                            coefficients[natural[k]] = np.int16(pair >> np.uint64(48)) * quanta[quantum + k]
                            k += (pair >> np.uint64(40)) & one
                            if k > 63:
                                break
                        if not known:
                            # All bits of the longest code and value again; 21 may be left, which does for a code.
                            word = _load(source + (place >> three)) << (place & seven)
                            size, run, value = _long_code(word, 2 + kind, short, limits, bases, symbols)
                            place += size
                            k += run
                            if size == 0 or (k > 63 and run != _REST):
                                return False
                            if k > 63:
                                break
                            coefficients[natural[k]] = value * quanta[quantum + k]
                            k += one
                    y, x = row - row_start, column - column_start
                    if component == 0:
                        y, x = y * down + number // across, x * across + number % across
                    stride = strides[component]
                    _transform(block_at, samples_at[component] + np.uint64(8 * y) * stride + np.uint64(8 * x), stride)
                    continue
                while k < 64:
                    word = _load(source + (place >> three)) << (place & seven)
                    known = True
                    for _ in range(4):
                        index = table + (word >> top)
                        size = np.uint64(passed[index])
                        following = k + np.uint64(steps[index])
                        if following > 63:
                            if following - np.uint64(_ENDED) < 64:
                                place += size
                                k = np.uint64(64)
                            else:
                                known = False
                            break
                        word <<= size
                        place += size
                        k = following
                    if not known:
                        size, run, _ = _long_code(word, 2 + kind, short, limits, bases, symbols)
                        place += size
                        k += run + one
                        if size == 0 or (k > 64 and run != _REST):
                            return False
    # Of the last byte, bits may be left over.
    rest = num_bits - np.int64(place)
    return rest >= 0 and (rest < 8 or row_stop < num_rows)


# ------------------------------------------------------------------------------------------------- samples

_POINT = 13  # binary digits after the point of the transform's factors
_MORE = 2  # … and of what is between its two directions


@intrinsic
def _transform(context: Kind, block: Kind, samples: Kind, stride: Kind) -> Kind:
    """64 coefficients (int16) at `block` become 8 rows of 8 bytes at `samples`; the block is zeros afterwards."""

    def code(context: Kind, b: ir.IRBuilder, signature: Kind, args: Kind) -> Kind:
        block, samples, stride = args
        short, wide, byte = (ir.VectorType(ir.IntType(bits), 8) for bits in (16, 32, 8))
        rows = []
        for row in range(8):
            place = b.inttoptr(b.add(block, ir.Constant(_LONG, 16 * row)), short.as_pointer())
            rows.append(b.sext(b.load(place, align=16), wide))
            b.store(ir.Constant(short, [0] * 8), place, align=16)
        columns = _one_direction(b, _turned(b, _one_direction(b, rows, _POINT - _MORE)), _POINT + _MORE + 3)
        least, most, middle = (ir.Constant(wide, [value] * 8) for value in (0, 255, 128))
        limited = []
        for column in columns:
            value = b.add(column, middle)
            value = b.select(b.icmp_signed(">", value, least), value, least)
            limited.append(b.select(b.icmp_signed("<", value, most), value, most))
        for row, values in enumerate(_turned(b, limited)):
            place = b.add(samples, b.mul(stride, ir.Constant(_LONG, row)))
            b.store(b.trunc(values, byte), b.inttoptr(place, byte.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 3), code


def _one_direction(b: ir.IRBuilder, x: list[Kind], shift: int) -> list[Kind]:
    """Eight vectors of coefficients to eight of samples: Loeffler, Ligtenberg and Moschytz's factorisation of the
    cosine transform, in the fixed-point numbers that make decoders agree to the bit."""

    def constant(value: int) -> Kind:
        return ir.Constant(x[0].type, [value] * 8)

    def times(value: Kind, factor: float) -> Kind:
        return b.mul(value, constant(round(factor * math.sqrt(2) * (1 << _POINT))))

    c1, c2, c3, c5, c6, c7 = (math.cos(k * math.pi / 16) for k in (1, 2, 3, 5, 6, 7))
    shared = times(b.add(x[2], x[6]), c6)
    low, high = b.add(shared, times(x[6], -c2 - c6)), b.add(shared, times(x[2], c2 - c6))
    rounding = constant(1 << (shift - 1))
    total, difference = (
        b.add(b.shl(value, constant(_POINT)), rounding) for value in (b.add(x[0], x[4]), b.sub(x[0], x[4]))
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


def _turned(b: ir.IRBuilder, rows: list[Kind]) -> list[Kind]:
    """Rows and columns exchanged: blocks of 4, of 2, then single values."""
    for step in (4, 2, 1):
        low = [i if i & step == 0 else 8 + i - step for i in range(8)]
        high = [i + step if i & step == 0 else 8 + i for i in range(8)]
        turned = list(rows)
        for at in range(8):
            if at & step == 0:
                turned[at] = shuffled(b, rows[at], rows[at + step], low)
                turned[at + step] = shuffled(b, rows[at], rows[at + step], high)
        rows = turned
    return rows


def shuffled(b: ir.IRBuilder, left: Kind, right: Kind, places: list[int]) -> Kind:
    """The values at `places` of two vectors put together."""
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))
