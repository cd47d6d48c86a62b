"""How the scan of a JPEG is to be read: sizes, sampling and tables, of the common kind of photograph alone.

What libjpeg-turbo would refuse or warn of is refused here too: it then decides. Called by `window.py`.
"""

import struct
from typing import NamedTuple

from podium.data.images.jpeg_frame import (
    END_OF_IMAGE,
    FRAME_MARKERS,
    SEQUENTIAL_MARKERS,
    START_OF_SCAN,
    segments,
)

_HUFFMAN, _QUANTISATION, _JFIF, _ADOBE, _COMMENT = 0xC4, 0xDB, 0xE0, 0xEE, 0xFE
#: segments that say nothing about decoding
_IGNORED = frozenset({*range(0xE0, 0xF0), _COMMENT})
#: content of a frame and of a scan with three components; the end of the latter: all coefficients, at once
_FRAME_BYTES, _SCAN_BYTES, _ALL_COEFFICIENTS = 15, 10, b"\x00\x3f\x00"
_JFIF_BYTES = 14
_MAX_TABLES, _MAX_SIDE = 4, 65500
#: pixels across and down for each sample of chroma, by the sampling factors of luma
_SAMPLINGS = {0x11: (1, 1), 0x21: (2, 1), 0x22: (2, 2)}


class Scan(NamedTuple):
    """The only scan of an image of luma and two chroma components (YCbCr)."""

    #: of its codes, in the file
    start: int
    stop: int
    height: int
    width: int
    #: pixels for each sample of chroma
    across: int
    down: int
    #: Huffman tables as in the file: of the first (DC) and the other (AC) coefficients of luma, then of chroma
    huffman: tuple[bytes, bytes, bytes, bytes]
    #: quantisation tables as in the file, one per component
    quantisation: tuple[bytes, bytes, bytes]


def read_scan(data: bytes) -> Scan | None:
    """Return how to read the scan; None if it is of another kind than `Scan` describes, or has no end."""
    quantisation: dict[int, bytes] = {}
    huffman: dict[int, bytes] = {}
    frame = scan = b""
    jfif, transform = False, None
    end = 0
    for marker, start, stop in segments(data):
        content = data[start:stop]
        if stop > len(data):
            return None
        if marker == _QUANTISATION:
            if not _add_quantisation(content, quantisation):
                return None
        elif marker == _HUFFMAN:
            if not _add_huffman(content, huffman):
                return None
        elif marker in FRAME_MARKERS:
            if frame or marker not in SEQUENTIAL_MARKERS:
                return None
            frame = content
        elif marker == _JFIF:
            jfif = jfif or (content.startswith(b"JFIF\0") and len(content) >= _JFIF_BYTES)
        elif marker == _ADOBE and content.startswith(b"Adobe"):
            transform = content[11] if len(content) > 11 else None
            if transform != 1:
                return None
        elif marker == START_OF_SCAN:
            scan, end = content, stop
        elif marker not in _IGNORED:
            return None
    if len(frame) != _FRAME_BYTES or len(scan) != _SCAN_BYTES or scan[-3:] != _ALL_COEFFICIENTS:
        return None
    bits, height, width, num_components = struct.unpack_from(">BHHB", frame)
    names, sampling, tables = (frame[6 + which :: 3] for which in range(3))
    code_tables = scan[2:8:2]
    if (bits, num_components, scan[0]) != (8, 3, 3) or scan[1:7:2] != names or len(set(names)) != 3:
        return None
    if 0 in (height, width) or max(height, width) > _MAX_SIDE:
        return None
    # Components with other names may be red, green and blue: the library decides.
    if sampling[1:] != b"\x11\x11" or sampling[0] not in _SAMPLINGS or not (jfif or transform or names == b"\1\2\3"):
        return None
    if code_tables[1] != code_tables[2]:
        return None
    codes = [huffman.get(key, b"") for table in code_tables[:2] for key in (table >> 4, 0x10 | table & 15)]
    factors = [quantisation.get(table, b"") for table in tables]
    last = data.rfind(END_OF_IMAGE, end)
    if not all(codes) or not all(factors) or last < 0:
        return None
    across, down = _SAMPLINGS[sampling[0]]
    return Scan(end, last, height, width, across, down, tuple(codes), tuple(factors))  # type: ignore[arg-type]


def _add_quantisation(content: bytes, tables: dict[int, bytes]) -> bool:
    """Add the tables of a segment; return False if they are not whole."""
    while content:
        size = 128 if content[0] >> 4 else 64
        number = content[0] & 15
        tables[number], content = content[1 : 1 + size], content[1 + size :]
        if len(tables[number]) != size or number >= _MAX_TABLES:
            return False
    return True


def _add_huffman(content: bytes, tables: dict[int, bytes]) -> bool:
    """Add the tables of a segment; return False if they are not whole."""
    while content:
        size = 16 + sum(content[1:17])
        number = content[0]
        tables[number], content = content[1 : 1 + size], content[1 + size :]
        if len(tables[number]) != size or number & 0xEF >= _MAX_TABLES:
            return False
    return True
