"""Lookup tables for the Huffman codes of a JPEG, and its quantisation factors. Called by `window.py`.

The next code cannot be found before the length of this one is known, so the tables look at twelve bits at once:

    blocks that are wanted   `ahead`: the bits of up to two codes with their values; `pairs`: what they mean, which is
                             looked up while the next two are found
    all other blocks         `skipped` and `steps`: bits and coefficients of as many codes as fit

Longer codes are looked up one by one.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podium.machine.numba_loops import compiled

INDEX_BITS = 12  # of an index into the tables
TO_END = 64  # a run to the end of the block
ENDED = 128  # added to the steps of codes the last of which is such a run
_MAX_SYMBOLS, _MAX_DC_SYMBOL = 256, 15

Value = Any  # of numba and llvmlite, which a type checker knows nothing of


class CodeTables(NamedTuple):
    """How codes are read. Tables by twelve bits: those of luma, followed by those of chroma. In `short` and the fields
    after it, the first two are of first coefficients (DC), the others of all others (AC)."""

    #: bits of the next two codes and their values, or of one; 0: longer
    ahead: NDArray[np.uint8]
    #: bits of the first | run << 8 | value << 16 | run of the second << 32 | whether there is one << 40 | value << 48
    pairs: NDArray[np.uint64]
    #: bits of all codes and values that fit, up to the end of the block
    skipped: NDArray[np.uint8]
    #: how many coefficients these are; TO_END if there are none, or too many for a block
    steps: NDArray[np.uint8]
    #: bits | symbol << 8 of a code alone; 0: longer
    short: NDArray[np.int32]
    #: (4, 17): codes of this many bits, aligned to 16, are below
    limits: NDArray[np.int64]
    #: (4, 17): where the symbols of codes of this many bits are, less the first of these codes
    bases: NDArray[np.int64]
    #: (4, 256)
    symbols: NDArray[np.uint8]


@functools.lru_cache(maxsize=64)
def build_code_tables(huffman: tuple[bytes, bytes, bytes, bytes]) -> CodeTables | None:
    """Build lookup tables from Huffman tables as in a file: 16 counts of codes by length, then the symbols.

    None if they are inconsistent. Kept, since most images have the same ones.
    """
    size = 1 << INDEX_BITS
    short, limits, bases = np.zeros((4, size), np.int32), np.zeros((4, 17), np.int64), np.zeros((4, 17), np.int64)
    symbols = np.zeros((4, _MAX_SYMBOLS), np.uint8)
    for table, kind in zip(huffman, (0, 2, 1, 3), strict=True):
        given = np.frombuffer(table, np.uint8)
        num_symbols = len(given) - 16
        if num_symbols != sum(table[:16]) or num_symbols > _MAX_SYMBOLS:
            return None
        if kind < 2 and num_symbols and given[16:].max() > _MAX_DC_SYMBOL:
            return None
        symbols[kind, :num_symbols] = given[16:]
        if not _place_codes(given, short[kind], limits[kind], bases[kind]):
            return None
    ahead, skipped, steps = (np.zeros((2, size), np.uint8) for _ in range(3))
    pairs = np.zeros((2, size), np.uint64)
    for chroma in range(2):
        _fill(short[2 + chroma], ahead[chroma], pairs[chroma], skipped[chroma], steps[chroma])
    return CodeTables(
        ahead.reshape(-1), pairs.reshape(-1), skipped.reshape(-1), steps.reshape(-1), short.reshape(-1),
        limits, bases, symbols,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def quantisation_factors(tables: tuple[bytes, ...]) -> NDArray[np.int32]:
    """Return the 64 factors of each table as in a file, of one byte or two, one table after the other."""
    return np.concatenate([np.frombuffer(table, ">u2" if len(table) > 64 else "u1") for table in tables]).astype("i4")


@compiled(error_model="numpy")
def _place_codes(given: Value, short: Value, limits: Value, bases: Value) -> Value:
    """Number the codes, shorter ones first; return False if there are more than fit. No code is all ones."""
    code = first = 0
    for length in range(1, 17):
        count = int(given[length - 1])
        if count > 0 and code + count >= 1 << length:
            return False
        bases[length] = first - code
        if length <= INDEX_BITS:
            span = 1 << (INDEX_BITS - length)
            for number in range(count):
                entry = np.int32(given[16 + first + number]) << 8 | length
                short[(code + number) * span : (code + number + 1) * span] = entry
        code, first = code + count, first + count
        limits[length] = code << (16 - length)
        code <<= 1
    return True


@compiled(error_model="numpy")
def _fill(short: Value, ahead: Value, pairs: Value, skipped: Value, steps: Value) -> None:
    """Fill the tables of codes with their values, from that of codes alone."""
    size = len(short)
    values = np.zeros(size, np.int64)  # bits | run << 8 | value << 16
    for index in range(size):
        length, symbol = short[index] & 255, short[index] >> 8
        run, extra = symbol >> 4, symbol & 15
        if length == 0 or length + extra > INDEX_BITS:
            continue
        if extra == 0:
            values[index] = length | (run if run == 15 else TO_END) << 8
            continue
        value = (index >> (INDEX_BITS - length - extra)) & ((1 << extra) - 1)
        if value < 1 << (extra - 1):
            value -= (1 << extra) - 1
        values[index] = (length + extra) | run << 8 | (value & 0xFFFF) << 16
    for index in range(size):
        pair = values[index]
        bits = pair & 255
        if bits != 0 and (pair >> 8) & 255 != TO_END:
            second = values[(index << bits) & (size - 1)]
            if second != 0 and bits + (second & 255) <= INDEX_BITS:
                bits += second & 255
                pair |= ((second >> 8) & 255) << 32 | 1 << 40 | (second >> 16) << 48
        ahead[index], pairs[index] = bits, np.uint64(pair)
        bits = step = ended = 0
        while ended == 0:
            value = values[(index << bits) & (size - 1)]
            if value == 0 or bits + (value & 255) > INDEX_BITS:
                break
            bits += value & 255
            if (value >> 8) & 255 == TO_END:
                ended = ENDED
            else:
                step += ((value >> 8) & 255) + 1
        skipped[index] = bits
        steps[index] = (step if bits != 0 and step < TO_END else TO_END) + ended
