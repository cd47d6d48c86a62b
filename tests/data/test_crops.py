"""Crops of JPEGs: equal to a whole decode wherever less is decoded, and windows that are a function of their place."""

import io
import zlib

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from podium.data.images import crops
from podium.data.images.crops import ImageError, centre_crop, decode_crop, image_size, random_windows, resized
from tests.support.photos import encoded, photo, saved

SUBSAMPLINGS = ["444", "422", "420", "440", "411", "gray"]


def whole(data: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "RGB")


@pytest.fixture
def decoded_sizes(monkeypatch) -> list[tuple[int, int]]:
    """Rows and columns of what is decoded."""
    sizes = []

    def watched(*args, **options):
        image = decode(*args, **options)
        sizes.append(image.shape[:2])
        return image

    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(crops.simplejpeg, "decode_jpeg", watched)
    return sizes


# ------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("size", [(131, 97), (128, 96)])
def test_crops_equal_those_of_a_whole_decode_to_the_bit(subsampling, size):
    data = encoded(photo(*size), subsampling)
    full = whole(data)
    for bottom in range(20, size[0] + 1):
        got = decode_crop(data, bottom - 20, 7, 20, 20, 20)
        assert np.array_equal(got, full[bottom - 20 : bottom, 7:27]), bottom


@pytest.mark.parametrize("window", [(0, 0, 131, 97), (0, 0, 40, 97), (50, 30, 33, 60), (130, 96, 1, 1), (0, 5, 1, 90)])
def test_crops_are_resized_like_those_of_a_whole_decode(window):
    data = encoded(photo(131, 97))
    top, left, height, width = window
    expected = resized(whole(data)[top : top + height, left : left + width], 64)
    got = decode_crop(data, *window, 64)
    assert got.shape == (64, 64, 3)
    assert got.dtype == np.uint8
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True}])
def test_crops_of_other_kinds_of_jpeg_equal_those_of_a_whole_decode(options):
    data = saved(Image.fromarray(photo(150, 200)), quality=85, **options)
    full = whole(data)
    for top in (0, 40, 101):
        assert np.array_equal(decode_crop(data, top, 11, 30, 30, 30), full[top : top + 30, 11:41])


def one_scan_per_channel(image: np.ndarray) -> bytes:
    """A sequential JPEG whose channels follow one another, put together from three grey ones."""
    channels = [encoded(np.repeat(image[..., i : i + 1], 3, axis=-1), "gray") for i in range(3)]
    frame, scan = channels[0].index(b"\xff\xc0"), channels[0].index(b"\xff\xda")
    after = frame + 2 + int.from_bytes(channels[0][frame + 2 : frame + 4], "big")
    parts = b"".join(bytes([1 + i, 0x11, 0]) for i in range(3))
    header = b"\xff\xc0\x00\x11" + channels[0][frame + 4 : frame + 9] + b"\x03" + parts
    scans = b""
    for i, channel in enumerate(channels):
        start = channel.index(b"\xff\xda")
        scans += b"\xff\xda\x00\x08\x01" + bytes([1 + i, 0, 0, 63, 0]) + channel[start + 10 : -2]
    return channels[0][:frame] + header + channels[0][after:scan] + scans + b"\xff\xd9"


def test_crops_of_a_jpeg_with_one_scan_per_channel_equal_those_of_a_whole_decode(decoded_sizes):
    data = one_scan_per_channel(photo(150, 200))
    full = whole(data)
    for top in (0, 40, 101):
        assert np.array_equal(decode_crop(data, top, 11, 30, 30, 30), full[top : top + 30, 11:41])
    assert decoded_sizes == [(150, 200), (32, 200), (72, 200), (136, 200)]


def test_rows_below_a_crop_are_not_decoded_by_the_library(decoded_sizes):
    data = encoded(photo(400, 300), "440")
    decode_crop(data, 0, 0, 60, 60, 60)
    decode_crop(data, 380, 0, 20, 20, 20)
    assert decoded_sizes == [(64, 300), (400, 300)]  # in units of 16 rows


@pytest.mark.parametrize(("side", "scale"), [(199, 1), (200, 2), (399, 2), (400, 4), (800, 8)])
def test_large_crops_are_decoded_at_a_lower_resolution(decoded_sizes, side, scale):
    data = encoded(photo(900, 900, noise=0, grain=100))
    got = decode_crop(data, 0, 88, side, side, 100)
    assert len(decoded_sizes) == (0 if scale == 1 else 1)  # others need no library
    for rows, columns in decoded_sizes:
        assert columns == -(-900 // scale)
        assert rows < 900 // scale
    plain = resized(whole(data)[:side, 88 : 88 + side], 100)
    assert np.abs(got.astype(int) - plain).mean() < 3


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_crops_at_a_lower_resolution_equal_those_of_a_whole_decode_there(subsampling):
    data = encoded(photo(301, 203), subsampling)
    half = simplejpeg.decode_jpeg(data, "RGB", min_height=151, min_width=102)
    assert half.shape == (151, 102, 3)
    for top in range(0, 142):
        got = decode_crop(data, top, 20, 160, 160, 80)
        expected = half[(top + 1) // 2 : (top + 161) // 2, 10:90]
        assert np.array_equal(got, resized(expected, 80)), top


@pytest.mark.parametrize("window", [(0, 0, 300, 400), (20, 30, 250, 200), (100, 0, 120, 300), (60, 70, 80, 90)])
def test_resizing_agrees_with_pillow(window):
    data = encoded(photo(300, 400))
    top, left, height, width = window
    pillow = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + width, top + height))
    expected = np.asarray(pillow.resize((224, 224), Image.Resampling.BILINEAR))
    assert np.abs(decode_crop(data, *window, 224).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("size", [(300, 400), (400, 300), (333, 500), (256, 256), (64, 90), (600, 800)])
def test_the_middle_is_that_of_the_resized_image(size):
    data = encoded(photo(*size, noise=0, grain=100))
    height, width = size
    short = min(size)
    pillow = Image.open(io.BytesIO(data)).resize((round(width * 256 / short), round(height * 256 / short)),
                                                 Image.Resampling.BILINEAR)  # fmt: skip
    top, left = (pillow.height - 224) // 2, (pillow.width - 224) // 2
    expected = np.asarray(pillow.crop((left, top, left + 224, top + 224))).astype(int)
    got = centre_crop(data, 256, 224)
    assert got.shape == (224, 224, 3)
    assert np.abs(got - expected).mean() < 2


def test_grey_images_have_three_equal_channels():
    data = encoded(photo(100, 80), "gray")
    got = decode_crop(data, 10, 10, 50, 50, 32)
    assert (got == got[..., :1]).all()


def test_cmyk_images_look_as_pillow_shows_them():
    picture = Image.fromarray(photo(100, 80, noise=0)).convert("CMYK")
    data = saved(picture, quality=95)
    assert image_size(data) == (100, 80)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    got = decode_crop(data, 0, 0, 60, 60, 60)
    assert np.abs(got - expected[:60, :60]).max() <= 3


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1"])
def test_png_images_are_read_whatever_they_are_called(mode):
    picture = Image.fromarray(photo(50, 70)).convert(mode)
    data = saved(picture, "PNG")
    assert image_size(data) == (50, 70)
    assert np.array_equal(decode_crop(data, 5, 6, 30, 30, 30), np.array(picture.convert("RGB"))[5:35, 6:36])


def test_a_thumbnail_before_the_image_is_passed_over():
    image, thumbnail = encoded(photo(100, 80)), encoded(photo(16, 16))
    segment = b"Exif\x00\x00" + thumbnail
    data = image[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + b"\xff" + image[2:]
    assert image_size(data) == (100, 80)
    assert np.array_equal(decode_crop(data, 0, 0, 20, 20, 20), whole(image)[:20, :20])


def test_images_of_one_pixel_are_read():
    for subsampling in SUBSAMPLINGS:
        assert decode_crop(encoded(photo(1, 1), subsampling), 0, 0, 1, 1, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("bottom", [20, 150])
def test_a_truncated_image_is_told_whatever_is_wanted_of_it(options, bottom):
    data = saved(Image.fromarray(photo(150, 200)), **options)
    with pytest.raises(ImageError, match="truncated"):
        decode_crop(data[: len(data) // 2], 0, 0, bottom, bottom, 20)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0", b"neither", b"\xff\xd8\xff\xc0\x00\x02"])
def test_what_is_no_image_is_told(data):
    with pytest.raises(ImageError):
        image_size(data)
    with pytest.raises(ImageError):
        decode_crop(data, 0, 0, 1, 1, 8)


def test_a_png_that_is_damaged_behind_its_pixels_is_told():
    data = saved(Image.fromarray(photo(20, 20)), "PNG")
    empty = b"\0\0\0\0tRNS" + zlib.crc32(b"tRNS").to_bytes(4, "big")
    with pytest.raises(ImageError):
        decode_crop(data[:-12] + empty + data[-12:], 0, 0, 20, 20, 8)


# ------------------------------------------------------------------------------------------------ windows


def sizes(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(200, 600, num), rng.integers(200, 600, num)


@settings(max_examples=40, deadline=None)
@given(
    stream=st.integers(0, 2**64 - 1),
    first=st.integers(0, 2**50),
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    lowest=st.floats(0.001, 1.0),
)
def test_windows_lie_within_their_image(stream, first, height, width, lowest):
    places = np.arange(first, first + 20)
    heights, widths = np.full(20, height), np.full(20, width)
    top, left, rows, columns = random_windows(stream, places, heights, widths, area=(lowest, 1.0)).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (rows >= 1).all()
    assert (columns >= 1).all()
    assert (top + rows <= heights).all()
    assert (left + columns <= widths).all()


def test_windows_have_the_area_and_ratio_asked_for():
    heights, widths = sizes(4000)
    _, _, rows, columns = random_windows(1, np.arange(4000), heights, widths).T
    share, ratio = rows * columns / (heights * widths), columns / rows
    assert share.min() > 0.078
    assert 0.73 < ratio.min() < 0.76
    assert 1.31 < ratio.max() < 1.36
    square = np.full(4000, 500)
    _, _, rows, columns = random_windows(1, np.arange(4000), square, square, area=(0.2, 0.4)).T
    share = rows * columns / 500**2
    assert share.min() > 0.199
    assert share.max() < 0.401
    assert abs(share.mean() - 0.3) < 0.01
    assert abs(np.log(columns / rows).mean()) < 0.01


def test_windows_lie_anywhere_in_the_image():
    square = np.full(4000, 500)
    top, left, rows, columns = random_windows(1, np.arange(4000), square, square, area=(0.1, 0.2)).T
    for start, length in ((top, rows), (left, columns)):
        where = start / (500 - length)
        assert abs(where.mean() - 0.5) < 0.02
        assert where.min() == 0
        assert where.max() == 1


def test_a_window_depends_only_on_stream_and_place():
    heights, widths = sizes(100)
    places = np.arange(1000, 1100)
    together = random_windows(5, places, heights, widths)
    for part in (slice(0, 1), slice(1, 40), slice(40, 100), slice(None, None, -1)):
        assert np.array_equal(random_windows(5, places[part], heights[part], widths[part]), together[part])
    assert not np.array_equal(random_windows(6, places, heights, widths), together)
    assert not np.array_equal(random_windows(5, places + 1, heights, widths), together)


def test_images_too_long_for_any_window_show_their_middle():
    heights, widths = np.array([2000, 20]), np.array([20, 2000])
    windows = random_windows(0, np.arange(2), heights, widths, area=(1.0, 1.0))
    assert windows.tolist() == [[986, 0, 27, 20], [0, 986, 20, 27]]


def _covered(windows: np.ndarray, box: list[float], side: int) -> np.ndarray:
    top, left, rows, columns = windows.T
    y_min, x_min, y_max, x_max = np.array(box) * side
    down = np.minimum(top + rows, y_max) - np.maximum(top, y_min)
    across = np.minimum(left + columns, x_max) - np.maximum(left, x_min)
    return np.clip(down, 0, None) * np.clip(across, 0, None) / ((y_max - y_min) * (x_max - x_min))


def test_windows_cover_enough_of_one_of_the_boxes():
    num, side = 2000, 500
    square, places = np.full(num, side), np.arange(num)
    one, other = [0.1, 0.1, 0.4, 0.3], [0.6, 0.5, 0.9, 0.9]
    boxes = [np.array([one, other], np.float32)] * num
    free = random_windows(1, places, square, square)
    bound = random_windows(1, places, square, square, boxes=boxes, min_covered=0.3)
    covers = np.maximum(_covered(free, one, side), _covered(free, other, side)) >= 0.3
    assert 0.1 < covers.mean() < 0.95
    assert np.array_equal(bound[covers], free[covers])
    assert (np.maximum(_covered(bound, one, side), _covered(bound, other, side)) >= 0.2999).all()


def test_boxes_count_only_for_their_own_image():
    num = 300
    square, places = np.full(num, 500), np.arange(num)
    box = np.array([[0.0, 0.0, 0.1, 0.1]], np.float32)
    nothing = [None, np.empty((0, 4), np.float32), np.array([[0.5, 0.5, 0.5, 0.5]], np.float32)]
    boxes = [box if place % 2 else nothing[place % 3] for place in range(num)]
    free = random_windows(1, places, square, square)
    bound = random_windows(1, places, square, square, boxes=boxes, min_covered=0.5)
    assert np.array_equal(bound[::2], free[::2])
    assert not np.array_equal(bound[1::2], free[1::2])
    assert np.array_equal(random_windows(1, places, square, square, boxes=[None] * num), free)
