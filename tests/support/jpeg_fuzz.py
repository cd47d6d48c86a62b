"""A fuzz target for the JPEG decoder: random and damaged files, each decoded with and without it.

    python -m tests.support.jpeg_fuzz --files 10000 --seed 0

Run in a process of its own by `tests/data/test_jpeg_fuzz.py`: machine code that goes astray may end the process. For
every file, `decode_crop` gives the same bits with the decoder as with libjpeg-turbo alone, or both refuse; and guard
bytes around all memory the decoder works in stay as they are. The last line counts what happened.
"""

import argparse
import collections
import functools
import struct
import sys

import numpy as np
from PIL import Image

from podium.data.images.crops import ImageError, decode_crop, image_size, set_window_decoder
from podium.data.images.jpeg.window import decode_window
from tests.support.photos import encoded, photo, saved

GUARD = 64
PATTERN = np.arange(GUARD, dtype=np.uint8) * 7 + 3
#: beyond this, the library alone would take most of the time and memory
MAX_PIXELS = 1 << 18
INTERESTING = (
    0x00,
    0x01,
    0x0F,
    0x10,
    0x1F,
    0x3F,
    0x40,
    0x7F,
    0x80,
    0xC0,
    0xC4,
    0xD9,
    0xDA,
    0xDB,
    0xE0,
    0xF0,
    0xFE,
    0xFF,
)


class Guarded:
    """Memory with guard bytes on both sides."""

    def __init__(self) -> None:
        self._all: list[np.ndarray] = []

    def __call__(self, num_bytes: int) -> np.ndarray:
        whole = np.empty(num_bytes + 2 * GUARD, np.uint8)
        whole[:GUARD] = whole[-GUARD:] = PATTERN
        self._all.append(whole)
        return whole[GUARD:-GUARD]

    def intact(self) -> bool:
        return all((whole[:GUARD] == PATTERN).all() and (whole[-GUARD:] == PATTERN).all() for whole in self._all)


@functools.cache
def originals() -> list[bytes]:
    """Small files of all kinds, of which most are of the kind that the decoder takes."""
    files = []
    for number, size in enumerate([(16, 16), (17, 33), (40, 24), (9, 50), (48, 48)]):
        image = photo(*size, seed=number)
        for subsampling in ("444", "422", "420"):
            files += [encoded(image, subsampling, quality) for quality in (20, 75, 98)]
        files.append(saved(Image.fromarray(image), quality=90, subsampling=2, optimize=True))
    image = Image.fromarray(photo(40, 40))
    files += [saved(image, progressive=True), saved(image.convert("L")), saved(image, restart_marker_rows=1)]
    files += [saved(image, qtables=[[300] * 64, [280] * 64]), saved(image, "PNG"), encoded(np.asarray(image), "440")]
    return files


def segment_starts(data: bytes) -> list[int]:
    return [at for at in range(2, len(data) - 4) if data[at] == 0xFF and data[at + 1] not in (0, 0xFF)]


def damaged(rng: np.random.Generator) -> bytes:
    """One file: random bytes, or one of the originals with up to four changes."""
    files = originals()
    if rng.random() < 0.03:
        return bytes(rng.integers(0, 256, rng.integers(0, 400), np.uint8))
    data = bytearray(files[rng.integers(len(files))])
    for _ in range(1 + min(3, rng.geometric(0.6) - 1)):
        change = rng.integers(13)
        at = int(rng.integers(len(data))) if data else 0
        header = min(len(data), 650)
        if not data:
            break
        if change == 0:  # a byte, anywhere
            data[at] = int(rng.integers(256))
        elif change == 1:  # a bit, anywhere
            data[at] ^= 1 << int(rng.integers(8))
        elif change in (2, 3):  # a byte of the header
            data[int(rng.integers(header))] = int(rng.choice(INTERESTING) if rng.random() < 0.5 else rng.integers(256))
        elif change == 4:  # cut short, with or without an end
            data = data[:at] + (b"\xff\xd9" if rng.random() < 0.5 else b"")
        elif change == 5:  # a piece taken out
            del data[at : at + int(rng.integers(1, 9))]
        elif change == 6:  # a piece put in
            data[at:at] = bytes(rng.integers(0, 256, rng.integers(1, 9), np.uint8))
        elif change == 7:  # a piece of another file
            other = files[rng.integers(len(files))]
            start = int(rng.integers(len(other)))
            piece = other[start : start + int(rng.integers(1, 60))]
            data[at : at + len(piece)] = piece
        elif change == 8:  # another size, in the frame header
            frame = next((s for s in segment_starts(bytes(data)) if data[s + 1] in (0xC0, 0xC1, 0xC2)), None)
            if frame is not None and frame + 9 <= len(data):
                struct.pack_into(">HH", data, frame + 5, *(int(side) for side in rng.integers(0, 90, 2)))
        elif change in (9, 10):  # a table of quantisation or of codes, whose bytes are the whole rest of the header
            kind = 0xDB if change == 9 else 0xC4
            tables = [s for s in segment_starts(bytes(data)) if data[s + 1] == kind]
            if tables:
                start = tables[rng.integers(len(tables))] + 5
                for place in range(start, min(start + 64, len(data))):
                    if rng.random() < (0.3 if change == 9 else 0.03):
                        data[place] = int(rng.integers(256))
        elif change == 11:  # a byte of the scan
            data[-int(rng.integers(1, 1 + max(1, len(data) - header)))] = int(rng.integers(256))
        else:  # a segment twice, or gone
            starts = segment_starts(bytes(data))
            if starts:
                start = starts[rng.integers(len(starts))]
                stop = start + 2 + (data[start + 2] << 8 | data[start + 3])
                data[start:start] = data[start:stop] if rng.random() < 0.5 else b""
                if rng.random() < 0.3:
                    del data[start:stop]
    return bytes(data)


def outcome(data: bytes, window: tuple[int, int, int, int], size: int) -> np.ndarray | None:
    try:
        return decode_crop(data, *window, size)
    except ImageError:
        return None


def check(data: bytes, rng: np.random.Generator) -> str:
    """What happened with one file; an AssertionError says what must not."""
    try:
        height, width = image_size(data)
    except ImageError:
        height, width = int(rng.integers(1, 40)), int(rng.integers(1, 40))
    inner_height, inner_width = (int(rng.integers(1, min(side, 200) + 1)) for side in (height, width))
    if rng.random() < 0.2:
        inner_height, inner_width = min(height, 200), min(width, 200)
    top, left = int(rng.integers(height - inner_height + 1)), int(rng.integers(width - inner_width + 1))
    window = (top, left, inner_height, inner_width)

    memory = Guarded()
    pixels = decode_window(data, *window, memory)
    assert memory.intact(), "it wrote beside its memory"
    if height * width > MAX_PIXELS:
        return "large"
    # As large as the window: nothing is decoded at a lower resolution, and all pixels count.
    size = max(inner_height, inner_width)
    set_window_decoder(False)
    expected = outcome(data, window, size)
    set_window_decoder(True)
    got = outcome(data, window, size)
    assert (got is None) == (expected is None), f"refused {'with' if got is None else 'without'} it only"
    assert got is None or np.array_equal(got, expected), "other pixels"
    return "decoded by it" if pixels is not None else "refused" if got is None else "left to the library"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    counts: collections.Counter[str] = collections.Counter()
    for number in range(options.files):
        rng = np.random.default_rng([options.seed, number])
        data = damaged(rng)
        try:
            counts[check(data, rng)] += 1
        except AssertionError as error:
            print(f"file {number} of seed {options.seed}: {error}", file=sys.stderr)
            if not options.keep_going:
                raise SystemExit(1) from None
            counts["FAILED"] += 1
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
