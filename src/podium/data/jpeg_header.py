"""What the header of a JPEG says: the size of the image, and how its scan is to be read. Called by `jpeg.py`."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_START, END = b"\xff\xd8", b"\xff\xd9"
_HUFFMAN, _QUANTA, _SCAN, _RESTART, _JFIF, _ADOBE = 0xC4, 0xDB, 0xDA, 0xDD, 0xE0, 0xEE
#: start of frame: 0xC0 … 0xCF without those that are tables (0xC4, 0xCC) or reserved (0xC8)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: whose blocks come in the order of rows: baseline and extended sequential, Huffman-coded
_SEQUENTIAL = frozenset({0xC0, 0xC1})
#: markers without content: fill, restart
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})
#: the size of the content of a frame and of a scan with three components, and the end of the latter: all coefficients
_FRAME_BYTES, _SCAN_BYTES, _ALL = 15, 10, b"\x00\x3f\x00"
#: horizontal and vertical samples of brightness for each of colour
_SAMPLINGS = {0x11: (1, 1), 0x21: (2, 1), 0x22: (2, 2)}


class Frame(NamedTuple):
    """What the frame header says. `place`: where its two bytes of height are."""

    place: int
    height: int
    width: int
    #: rows decoded at a time
    unit: int
    sequential: bool


class Scan(NamedTuple):
    """The one scan of an image of brightness and two colours (YCbCr), all three of them in it."""

    #: of its codes, in the file
    start: int
    stop: int
    height: int
    width: int
    #: pixels for each sample of colour
    across: int
    down: int
    #: tables as they are in the file: codes of the first and of the other coefficients of brightness, then of colour
    codes: tuple[bytes, bytes, bytes, bytes]
    #: the same of the quanta of each component
    quanta: tuple[bytes, bytes, bytes]


def frame_of(data: bytes) -> Frame | None:
    """The frame header; None where these are not the bytes of a JPEG, or of one without a height in its header."""
    for marker, start, stop in _segments(data):
        if marker in _FRAMES:
            num_components = data[start + 5] if stop <= len(data) and stop >= start + 6 else 0
            if num_components == 0 or stop < start + 6 + 3 * num_components:
                return None
            height, width = struct.unpack_from(">HH", data, start + 1)
            tallest = max(data[start + 7 + 3 * component] & 15 for component in range(num_components))
            if 0 in (height, width, tallest):
                return None
            return Frame(start + 1, height, width, 8 * tallest, marker in _SEQUENTIAL)
    return None


def scan_of(data: bytes) -> Scan | None:
    """None where it is of another kind than `Scan` describes, or has no end."""
    quanta: dict[int, bytes] = {}
    codes: dict[int, bytes] = {}
    frame = scan = b""
    jfif, transform = False, None
    end = 0
    for marker, start, stop in _segments(data):
        content = data[start:stop]
        if stop > len(data) or marker == _RESTART:
            return None
        if marker == _QUANTA:
            while content:
                size = 128 if content[0] >> 4 else 64
                quanta[content[0] & 15], content = content[1 : 1 + size], content[1 + size :]
        elif marker == _HUFFMAN:
            while content:
                size = 16 + sum(content[1:17])
                codes[content[0]], content = content[1 : 1 + size], content[1 + size :]
        elif marker in _FRAMES:
            if frame or marker not in _SEQUENTIAL:
                return None
            frame = content
        elif marker == _JFIF:
            jfif = jfif or content.startswith(b"JFIF\0")
        elif marker == _ADOBE and content.startswith(b"Adobe"):
            transform = content[11] if len(content) > 11 else None
            if transform != 1:
                return None
        elif marker == _SCAN:
            scan, end = content, stop
    if len(frame) != _FRAME_BYTES or len(scan) != _SCAN_BYTES or scan[-3:] != _ALL:
        return None
    bits, height, width, num_components = struct.unpack_from(">BHHB", frame)
    names, sampling, of_quanta = (frame[6 + which :: 3] for which in range(3))
    of_codes = scan[2:8:2]
    if (bits, num_components, scan[0]) != (8, 3, 3) or scan[1:7:2] != names or 0 in (height, width):
        return None
    # As the library has it, what names its components otherwise may hold red, green and blue.
    if sampling[1:] != b"\x11\x11" or sampling[0] not in _SAMPLINGS or not (jfif or transform or names == b"\1\2\3"):
        return None
    if of_codes[1] != of_codes[2]:
        return None
    wanted = [codes.get(key, b"") for of in of_codes[:2] for key in (of >> 4, 0x10 | of & 15)]
    factors = [quanta.get(table, b"") for table in of_quanta]
    if not all(len(table) > 16 for table in wanted) or not all(len(table) in (64, 128) for table in factors):
        return None
    last = data.rfind(END, end)
    if last < 0:
        return None
    across, down = _SAMPLINGS[sampling[0]]
    return Scan(end, last, height, width, across, down, tuple(wanted), tuple(factors))  # type: ignore[arg-type]


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, where its content starts, where it should end) of those up to the first scan; none if it is no JPEG."""
    if data[:2] != _START:
        return
    place, end = 2, len(data)
    while place + 4 <= end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF or marker in _BARE:
            place += 1 if marker == 0xFF else 2
            continue
        stop = place + 2 + (data[place + 2] << 8 | data[place + 3])
        yield marker, place + 4, stop
        if marker == _SCAN or stop < place + 4:
            return
        place = stop
