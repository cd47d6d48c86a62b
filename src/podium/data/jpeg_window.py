"""Windows of the usual kind of photograph, decoded without what is beside them: bit for bit as libjpeg-turbo does.

    file → where its scan is, tables               `jpeg_header.py`
    scan → samples of the units around the window  `jpeg_codes.py`
    samples → RGB                                  `jpeg_colours.py`

The usual kind is one sequential scan of 8 bits in brightness and two colours, these whole, halved across or both
ways. `jpeg.py` has libjpeg-turbo decode all others, and what makes no sense here.
"""

import numpy as np
from numpy.typing import NDArray

from podium.data.jpeg_codes import SPARE_BYTES, codes_of, quanta_of, read_codes, unstuffed
from podium.data.jpeg_colours import ROOM, paint
from podium.data.jpeg_header import scan_of

_BLOCK = 8


def decode_window(data: bytes, top: int, left: int, height: int, width: int) -> NDArray[np.uint8] | None:
    """(height, width, 3) of RGB; None where it is not of the usual kind, or not a window of it."""
    scan = scan_of(data)
    codes = None if scan is None else codes_of(scan.codes)
    if scan is None or codes is None:
        return None
    if min(top, left) < 0 or min(height, width) < 1 or top + height > scan.height or left + width > scan.width:
        return None
    across, down = scan.across, scan.down
    # In samples of colour.
    num_rows, num_columns = -(-scan.height // down), -(-scan.width // across)
    if across == 2 and num_columns <= 2:  # the library repeats these
        return None
    row_start, row_stop = _units(top, height, down, num_rows)
    column_start, column_stop = _units(left, width, across, num_columns)
    bits = np.empty(scan.stop - scan.start + SPARE_BYTES, np.uint8)
    num_bytes = unstuffed(np.frombuffer(data, np.uint8), scan.start, scan.stop, bits)
    if num_bytes < 0:
        return None
    bits[num_bytes : num_bytes + SPARE_BYTES] = 0
    rows, columns = _BLOCK * (row_stop - row_start), _BLOCK * (column_stop - column_start)
    planes = (_plane(rows * down, columns * across), _plane(rows, columns), _plane(rows, columns))
    sampling, units = (across, down), (-(-num_rows // _BLOCK), -(-num_columns // _BLOCK))
    around = (row_start, row_stop, column_start, column_stop)
    if not read_codes(bits, 8 * num_bytes, tuple(codes), quanta_of(scan.quanta), sampling, units, around, planes):
        return None
    out = np.empty(height * width * 3 + ROOM, np.uint8)
    corner = (_BLOCK * row_start, _BLOCK * column_start)
    paint(planes, sampling, corner, (num_rows, num_columns), (top, left, height, width), out)
    return out[: height * width * 3].reshape(height, width, 3)


def _units(first: int, length: int, pixels: int, limit: int) -> tuple[int, int]:
    """First unit, and the one after the last, of pixels first … first + length - 1 and of the samples of colour beside
    theirs; `pixels` for each sample of colour, of `limit` samples."""
    start = max(first // pixels - (pixels - 1), 0)
    last = min((first + length - 1) // pixels + (pixels - 1), limit - 1)
    return start // _BLOCK, last // _BLOCK + 1


def _plane(height: int, width: int) -> NDArray[np.uint8]:
    return np.empty(height * width + ROOM, np.uint8)[: height * width].reshape(height, width)
