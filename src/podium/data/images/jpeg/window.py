"""Decodes a window of the common kind of photograph without decoding what is beside it, bit for bit as libjpeg-turbo.

    file → where its scan is, tables               `header.py`
    Huffman tables → lookup tables                 `code_tables.py`
    scan → samples of the units around the window  `entropy.py`, `inverse_dct.py`
    samples → RGB                                  `colour.py`

The common kind has one sequential scan of 8 bits in luma and two chroma components, these of full size, halved across
or halved both ways. All others, and whatever makes no sense here, are left to libjpeg-turbo by `images/crops.py`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from podium.data.images.jpeg.code_tables import build_code_tables, quantisation_factors
from podium.data.images.jpeg.colour import ROOM, convert_to_rgb, work_sizes
from podium.data.images.jpeg.entropy import SPARE_BYTES, decode_blocks, remove_stuffing
from podium.data.images.jpeg.header import read_scan
from podium.data.images.jpeg_frame import rows_to_decode

_BLOCK = 8

#: gives uninitialised memory of so many bytes; machine code that checks no bounds works in it
Allocator = Callable[[int], NDArray[np.uint8]]


def _allocate(num_bytes: int) -> NDArray[np.uint8]:
    return np.empty(num_bytes, np.uint8)


def decode_window(
    data: bytes, top: int, left: int, height: int, width: int, allocate: Allocator = _allocate
) -> NDArray[np.uint8] | None:
    """Decode a window as RGB (height, width, 3); None if the image is not of the common kind, or has no such window."""
    scan = read_scan(data)
    codes = None if scan is None else build_code_tables(scan.huffman)
    if scan is None or codes is None:
        return None
    if min(top, left) < 0 or min(height, width) < 1 or top + height > scan.height or left + width > scan.width:
        return None
    across, down = scan.across, scan.down
    # In samples of chroma.
    num_rows, num_columns = -(-scan.height // down), -(-scan.width // across)
    if across == 2 and num_columns <= 2:  # the library repeats these instead of interpolating
        return None
    row_start, row_stop = _units(top, height, down, num_rows)
    column_start, column_stop = _units(left, width, across, num_columns)
    bits = allocate(scan.stop - scan.start + SPARE_BYTES)
    num_bytes = remove_stuffing(np.frombuffer(data, np.uint8), scan.start, scan.stop, bits)
    if num_bytes < 0:
        return None
    bits[num_bytes : num_bytes + SPARE_BYTES] = 0
    rows, columns = _BLOCK * (row_stop - row_start), _BLOCK * (column_stop - column_start)
    shapes = ((rows * down, columns * across), (rows, columns), (rows, columns))
    planes = tuple(allocate(y * x + ROOM)[: y * x].reshape(y, x) for y, x in shapes)
    sampling, units = (across, down), (-(-num_rows // _BLOCK), -(-num_columns // _BLOCK))
    around = (row_start, row_stop, column_start, column_stop)
    # Where `crops.py` would have the library decode the whole image, damage below the window is noticed there and here.
    to_end = row_stop == units[0] or rows_to_decode(top + height, _BLOCK * down) >= scan.height
    factors = quantisation_factors(scan.quantisation)
    if not decode_blocks(bits, 8 * num_bytes, tuple(codes), factors, sampling, units, around, to_end, planes):
        return None
    lines, wide = (allocate(2 * count).view(np.int16) for count in work_sizes(left, width, across))
    out = allocate(height * width * 3 + ROOM)
    corner = (_BLOCK * row_start, _BLOCK * column_start)
    convert_to_rgb(planes, sampling, corner, (num_rows, num_columns), (top, left, height, width), lines, wide, out)
    return out[: height * width * 3].reshape(height, width, 3)


def _units(first: int, length: int, pixels: int, limit: int) -> tuple[int, int]:
    """Return the first unit, and the one after the last, of pixels first … first + length - 1 and of the chroma that
    theirs is interpolated from; `pixels` for each sample of chroma, of which there are `limit`."""
    start = max(first // pixels - (pixels - 1), 0)
    last = min((first + length - 1) // pixels + (pixels - 1), limit - 1)
    return start // _BLOCK, last // _BLOCK + 1
