"""Windows decoded by themselves: the library's bits, whatever the window and the image (damaged: test_jpeg_fuzz)."""

import functools
import sys

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from podium.data.images.crops import decode_crop, set_window_decoder
from podium.data.images.jpeg.code_tables import build_code_tables
from podium.data.images.jpeg.header import read_scan
from podium.data.images.jpeg.window import decode_window
from tests.support.photos import encoded, photo, saved

USUAL = ["444", "422", "420"]
SIZES = [(375, 500), (131, 97), (128, 96), (16, 16), (17, 33), (9, 7), (1, 200), (200, 5)]


@functools.cache
def picture(size: tuple[int, int], subsampling: str, quality: int, optimised: bool) -> tuple[bytes, np.ndarray]:
    """A file and what the library makes of it. Quality 100 is of noise: longest codes, values beyond black or white."""
    rng = np.random.default_rng(quality)
    image = photo(*size) if quality < 100 else rng.integers(0, 2, (*size, 3), np.uint8) * 255
    ImageFile.MAXBLOCK = max(ImageFile.MAXBLOCK, 1 << 22)  # or Pillow has no room for the codes of noise
    chosen = {"444": 0, "422": 1, "420": 2}[subsampling]
    data = saved(Image.fromarray(image), quality=quality, subsampling=chosen, optimize=optimised)
    return data, simplejpeg.decode_jpeg(data, "RGB")


@st.composite
def windows(draw: st.DrawFn, size: tuple[int, int]) -> tuple[int, int, int, int]:
    height, width = (draw(st.integers(1, side)) for side in size)
    return draw(st.integers(0, size[0] - height)), draw(st.integers(0, size[1] - width)), height, width


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(SIZES), st.sampled_from(USUAL), st.sampled_from([5, 40, 90, 98, 100]), st.booleans(), st.data())
def test_windows_have_the_bits_of_a_whole_decode(size, subsampling, quality, optimised, data):
    image, full = picture(size, subsampling, quality, optimised)
    top, left, height, width = data.draw(windows(size))
    got = decode_window(image, top, left, height, width)
    assert got is not None
    assert np.array_equal(got, full[top : top + height, left : left + width])


@pytest.mark.parametrize("subsampling", USUAL)
def test_windows_at_all_edges_have_the_bits_of_a_whole_decode(subsampling):
    image, full = picture((131, 97), subsampling, 90, False)
    for top in (0, 1, 7, 8, 15, 16, 17, 130 - 40, 131 - 40):
        for left in (0, 1, 7, 8, 15, 16, 17, 96 - 40, 97 - 40):
            assert np.array_equal(decode_window(image, top, left, 40, 40), full[top : top + 40, left : left + 40])


def test_a_block_whose_last_coefficient_is_not_zero_ends_without_a_mark():
    steps = np.indices((64, 64)).sum(0) % 2 * 255  # the highest frequency of both directions
    data = simplejpeg.encode_jpeg(np.repeat(steps[..., None], 3, -1).astype(np.uint8), 100, "RGB", "444")
    full = simplejpeg.decode_jpeg(data, "RGB")
    for window in [(0, 0, 64, 64), (50, 50, 14, 14), (20, 0, 10, 64)]:
        top, left, height, width = window
        assert np.array_equal(decode_window(data, *window), full[top : top + height, left : left + width])


def test_two_bytes_for_each_quantum_are_read():
    data = saved(Image.fromarray(photo(60, 60)), qtables=[[300] * 64, [280] * 64], subsampling=2)
    assert b"\xff\xdb" in data
    assert np.array_equal(decode_window(data, 3, 5, 50, 40), simplejpeg.decode_jpeg(data, "RGB")[3:53, 5:45])


OTHERS = {
    "progressive": lambda image: saved(image, progressive=True),
    "grey": lambda image: saved(image.convert("L")),
    "four colours": lambda image: saved(image.convert("CMYK")),
    "red, green and blue": lambda image: saved(image, keep_rgb=True),
    "restarts": lambda image: saved(image, restart_marker_rows=1),
    "halved down": lambda image: encoded(np.asarray(image), "440"),
    "a quarter across": lambda image: encoded(np.asarray(image), "411"),
    "no end": lambda image: saved(image)[:-2],
    "no JPEG": lambda image: saved(image, "PNG"),
    "nothing": lambda image: b"",
    "half a header": lambda image: saved(image)[:100],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_left_to_the_library(kind):
    assert decode_window(OTHERS[kind](Image.fromarray(photo(64, 64))), 0, 0, 20, 20) is None


@pytest.mark.parametrize("window", [(-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 0, 5), (0, 60, 5, 5), (60, 0, 5, 5)])
def test_windows_beyond_the_image_are_refused(window):
    assert decode_window(encoded(photo(64, 64)), *window) is None


def test_an_image_that_has_lost_rows_is_left_to_the_library():
    data = encoded(photo(200, 200))
    cut = data[: len(data) // 2] + b"\xff\xd9"
    assert decode_window(cut, 0, 0, 20, 20) is not None
    assert decode_window(cut, 150, 0, 50, 20) is None


def test_bytes_behind_the_last_block_are_left_to_the_library():
    data = encoded(photo(64, 64))
    longer = data[:-2] + bytes(20) + b"\xff\xd9"
    assert decode_window(longer, 0, 0, 20, 20) is not None
    assert decode_window(longer, 0, 0, 64, 64) is None


@pytest.mark.parametrize(
    "table",
    [
        bytes([3, *[0] * 15]) + b"abc",  # three codes of one bit
        bytes([1, *[0] * 15]) + b"ab",  # more symbols than codes
        bytes([0, 0, *[255] * 2, *[0] * 12]) + bytes(510),
    ],
)
def test_tables_that_contradict_themselves_are_refused(table):
    good = read_scan(encoded(photo(32, 32))).huffman
    assert build_code_tables(good) is not None
    for which in range(4):
        assert build_code_tables((*good[:which], table, *good[which + 1 :])) is None


@pytest.mark.parametrize("missing", ["window", "entropy", "header"])
def test_without_the_decoder_the_library_gives_the_same_bits(missing, monkeypatch):
    data, window = encoded(photo(90, 120), "420"), (11, 7, 60, 80)
    expected = decode_crop(data, *window, 80)
    assert set_window_decoder(False) is False
    assert np.array_equal(decode_crop(data, *window, 80), expected)
    with monkeypatch.context() as patch:
        for module in ("window", missing):
            patch.delitem(sys.modules, f"podium.data.images.jpeg.{module}", raising=False)
        patch.setitem(sys.modules, f"podium.data.images.jpeg.{missing}", None)
        assert set_window_decoder(True) is False
        assert np.array_equal(decode_crop(data, *window, 80), expected)
    assert set_window_decoder(True) is True
    assert np.array_equal(decode_crop(data, *window, 80), expected)
