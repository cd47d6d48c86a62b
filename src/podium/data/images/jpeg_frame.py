"""The frame header of a JPEG: the size of the image and whether its rows come in order. Called by `crops.py` and by the
decoder in `jpeg/`."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

START_OF_IMAGE, END_OF_IMAGE = b"\xff\xd8", b"\xff\xd9"
START_OF_SCAN = 0xDA
#: start-of-frame markers: 0xC0 … 0xCF without those of tables (0xC4, 0xCC) and the reserved one (0xC8)
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: frames whose blocks come row by row: baseline and extended sequential, Huffman-coded
SEQUENTIAL_MARKERS = frozenset({0xC0, 0xC1})
#: markers without a segment: temporary, restart
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})
#: rows beyond the last one needed: its chroma is interpolated with that of the row below
_CONTEXT_ROWS = 2


class Frame(NamedTuple):
    """What the frame header says. `height_offset`: where in the file the two bytes of the height are."""

    height_offset: int
    height: int
    width: int
    #: rows that are decoded together
    mcu_height: int
    sequential: bool


def read_frame(data: bytes) -> Frame | None:
    """Return the frame header; None if `data` is no JPEG, or one without a height in its header."""
    for marker, start, stop in segments(data):
        if marker in FRAME_MARKERS:
            num_components = data[start + 5] if stop <= len(data) and stop >= start + 6 else 0
            if num_components == 0 or stop < start + 6 + 3 * num_components:
                return None
            height, width = struct.unpack_from(">HH", data, start + 1)
            tallest = max(data[start + 7 + 3 * component] & 15 for component in range(num_components))
            if 0 in (height, width, tallest):
                return None
            return Frame(start + 1, height, width, 8 * tallest, marker in SEQUENTIAL_MARKERS)
    return None


def rows_to_decode(bottom: int, mcu_height: int, scale: int = 1) -> int:
    """Return how many rows of an image must be decoded for the rows above `bottom` to be right, at 1/scale."""
    return -(-(bottom + _CONTEXT_ROWS * scale) // mcu_height) * mcu_height


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's content, up to the first scan; nothing if `data` is no JPEG."""
    if data[:2] != START_OF_IMAGE:
        return
    place, end = 2, len(data)
    while place + 4 <= end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF or marker in _BARE_MARKERS:
            place += 1 if marker == 0xFF else 2
            continue
        stop = place + 2 + (data[place + 2] << 8 | data[place + 3])
        yield marker, place + 4, stop
        if marker == START_OF_SCAN or stop < place + 4:
            return
        place = stop
