"""From the Huffman codes of a JPEG's scan to the samples of a part of it, equal to the bit to libjpeg-turbo's.

Reading the codes, one after the other from the first, is most of the work of decoding. Those of blocks that are not
wanted are only skipped; no library does that, which is why this is written here. `code_tables.py` says how codes are
looked up, `inverse_dct.py` turns coefficients into samples. Called by `window.py`.
"""

import sys

import numpy as np
from llvmlite import ir
from numba import types

from podium.data.images.jpeg.code_tables import ENDED, INDEX_BITS, TO_END, Value
from podium.data.images.jpeg.inverse_dct import inverse_dct
from podium.machine.numba_loops import compiled, intrinsic

_MAX_DC_BITS = 11  # of the value of a first coefficient of 8-bit images
#: bytes after the last that may be read: those of six blocks of the longest codes
SPARE_BYTES = 2048
#: places of the coefficients, which come in diagonals of the block, turning back at its edges
_ZIGZAG = np.array(
    sorted(range(64), key=lambda at: (sum(divmod(at, 8)), at // 8 if sum(divmod(at, 8)) % 2 else at % 8)), np.uint8
)
_LONG = ir.IntType(64)


@intrinsic
def _load(context: Value, address: Value) -> Value:
    """Read eight bytes as a number, the first byte the highest."""

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        return _first_highest(b, b.load(b.inttoptr(args[0], _LONG.as_pointer()), align=1))

    return types.uint64(types.uint64), code


@intrinsic
def _store(context: Value, address: Value, word: Value) -> Value:
    """Write eight bytes, the highest first."""

    def code(context: Value, b: ir.IRBuilder, signature: Value, args: Value) -> Value:
        b.store(_first_highest(b, args[1]), b.inttoptr(args[0], _LONG.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), code


def _first_highest(b: ir.IRBuilder, word: Value) -> Value:
    """Reverse the bytes of a word on machines that store the lowest first."""
    return b.bswap(word) if sys.byteorder == "little" else word


@compiled(error_model="numpy")
def remove_stuffing(data: Value, start: Value, stop: Value, out: Value) -> Value:
    """Copy data[start:stop] without the zero after each byte of 255; return the number of bytes, -1 at a marker."""
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
def _read_symbol(word: Value, kind: Value, short: Value, limits: Value, bases: Value, symbols: Value) -> Value:
    """Return (bits, symbol) of the code at the top of a word; no bits if there is no such code."""
    entry = short[(np.uint64(kind) << np.uint64(INDEX_BITS)) + (word >> np.uint64(64 - INDEX_BITS))]
    if entry != 0:
        return np.int64(entry & 255), np.int64(entry >> 8)
    code = np.int64(word >> np.uint64(48))
    for length in range(INDEX_BITS + 1, 17):
        if code < limits[kind, length]:
            return np.int64(length), np.int64(symbols[kind, bases[kind, length] + (code >> (16 - length))])
    return np.int64(0), np.int64(0)


@compiled(error_model="numpy")
def _read_value(word: Value, length: Value, extra: Value) -> Value:
    """Return the value that `extra` bits after the first `length` of a word stand for."""
    if extra == 0:
        return np.int64(0)
    value = np.int64((word << np.uint64(length)) >> np.uint64(64 - extra))
    if value < 1 << (extra - 1):
        value -= (1 << extra) - 1
    return value


@compiled(error_model="numpy")
def _read_code(word: Value, kind: Value, short: Value, limits: Value, bases: Value, symbols: Value) -> Value:
    """Return (bits, run, value) of a code with its value, of any length; no bits if there is no such code."""
    length, symbol = _read_symbol(word, kind, short, limits, bases, symbols)
    run, extra = symbol >> 4, symbol & 15
    if extra == 0 and run < 15:
        run = TO_END
    return np.uint64(length + extra if length else 0), np.uint64(run), _read_value(word, length, extra)


@compiled(error_model="numpy")
def decode_blocks(
    bits: Value,
    num_bits: Value,
    codes: Value,
    factors: Value,
    sampling: Value,
    units: Value,
    window: Value,
    to_end: Value,
    planes: Value,
) -> Value:
    """Fill planes (luma and two of chroma) with the samples of a window; return False if the codes make no sense, or
    their values too little for decoders to agree on them.

    A unit is `sampling` (across, down) blocks of luma and one of each chroma; the image has `units` (rows, columns).
    `window`: first row of units, the one after the last, first column, the one after the last. `to_end`: whether to
    check the codes after the window too. `bits` are those of the scan, followed by SPARE_BYTES of zeros."""
    ahead, pairs, skipped, steps, short, limits, bases, symbols = codes
    (across, down), (num_rows, num_columns) = sampling, units
    row_start, row_stop, column_start, column_stop = window
    zigzag = _ZIGZAG
    block = np.zeros(64 + 16, np.int16)
    block_at = (np.uint64(block.ctypes.data) + np.uint64(31)) & ~np.uint64(31)
    coefficients = block[np.int64(block_at - np.uint64(block.ctypes.data)) >> 1 :]
    samples_at = np.array([plane.ctypes.data for plane in planes], np.uint64)
    strides = np.array([plane.shape[1] for plane in planes], np.uint64)
    source, place = np.uint64(bits.ctypes.data), np.uint64(0)
    one, three, seven, top = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(64 - INDEX_BITS)
    num_luma = across * down
    last = np.zeros(3, np.int64)
    beyond = np.uint64(0)
    for row in range(num_rows if to_end else row_stop):
        for column in range(num_columns):
            if np.int64(place) > num_bits:
                return False
            if row == row_stop - 1 and column >= column_stop and not to_end:
                return beyond == 0
            inside = row >= row_start and row < row_stop and column >= column_start and column < column_stop
            for number in range(num_luma + 2):
                component = 0 if number < num_luma else number - num_luma + 1
                kind = min(component, 1)
                table = np.uint64(kind) << np.uint64(INDEX_BITS)
                word = _load(source + (place >> three)) << (place & seven)
                length, extra = _read_symbol(word, kind, short, limits, bases, symbols)
                if length == 0 or extra > _MAX_DC_BITS:
                    return False
                last[component] += _read_value(word, length, extra)
                place += np.uint64(length + extra)
                k = one
                if inside:
                    own = np.uint64(component) << np.uint64(6)  # where its factors begin
                    coefficients[0] = last[component] * factors[own]
                    while k < 64:
                        word = _load(source + (place >> three)) << (place & seven)
                        known = True
                        for _ in range(4):  # 48 of the at least 57 bits in the word
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
                                if run != TO_END:
                                    return False
                                break
                            coefficients[zigzag[k]] = np.int16(pair >> np.uint64(16)) * factors[own + k]
                            k += one
                            if k > 63:  # the second is of another block
                                place -= size - (pair & np.uint64(255))
                                break
                            run = (pair >> np.uint64(32)) & np.uint64(127)
                            k += run
                            if k > 63:
                                if run != TO_END:
                                    return False
                                break
                            # If there is no second, a zero, which the next one overwrites.
                            coefficients[zigzag[k]] = np.int16(pair >> np.uint64(48)) * factors[own + k]
                            k += (pair >> np.uint64(40)) & one
                            if k > 63:
                                break
                        if not known:
                            # Read again: 21 bits may be left, enough for a code but not for its value.
                            word = _load(source + (place >> three)) << (place & seven)
                            size, run, value = _read_code(word, 2 + kind, short, limits, bases, symbols)
                            place += size
                            k += run
                            if size == 0 or (k > 63 and run != TO_END):
                                return False
                            if k > 63:
                                break
                            coefficients[zigzag[k]] = value * factors[own + k]
                            k += one
                    y, x = row - row_start, column - column_start
                    if component == 0:
                        y, x = y * down + number // across, x * across + number % across
                    stride = strides[component]
                    corner = samples_at[component] + np.uint64(8 * y) * stride + np.uint64(8 * x)
                    beyond |= inverse_dct(block_at, corner, stride)
                    continue
                while k < 64:
                    word = _load(source + (place >> three)) << (place & seven)
                    known = True
                    for _ in range(4):
                        index = table + (word >> top)
                        size = np.uint64(skipped[index])
                        following = k + np.uint64(steps[index])
                        if following > 63:
                            if following - np.uint64(ENDED) < 64:
                                place += size
                                k = np.uint64(64)
                            else:
                                known = False
                            break
                        word <<= size
                        place += size
                        k = following
                    if not known:
                        size, run, _ = _read_code(word, 2 + kind, short, limits, bases, symbols)
                        place += size
                        k += run + one
                        if size == 0 or (k > 64 and run != TO_END):
                            return False
    rest = num_bits - np.int64(place)
    return beyond == 0 and rest >= 0 and (rest < 8 or not to_end)  # the last byte is padded
