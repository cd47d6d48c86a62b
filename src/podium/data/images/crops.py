"""Crops of JPEG images at the size a network needs, decoding no more than necessary; and which crops to take.

`decode_crop` saves work in three ways. The first two give the bits of a whole decode:

    what is beside the crop   of the common kind of photograph, only the crop itself is decoded, by `jpeg/window.py`
    rows below the crop       libjpeg-turbo, which decodes all others, decodes a sequential JPEG from the top; a copy
                              whose header gives a smaller height ends where the crop does
    pixels to be averaged     a crop of at least twice the size needed is decoded by libjpeg-turbo at 1/2, 1/4 or 1/8 of
                              its resolution, straight from the DCT coefficients

`jpeg/` is a guest: without it, or with `set_window_decoder(False)`, libjpeg-turbo decodes everything, to the same bits.
What libjpeg-turbo does not read (a PNG under a JPEG's name, say) goes through Pillow. Called by `source.py`.
"""

import io
import math
import struct
from collections.abc import Callable, Sequence

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from podium.data.images.jpeg_frame import END_OF_IMAGE, Frame, read_frame, rows_to_decode
from podium.machine import counter_rng
from podium.ui.first_use import told_at_first

_ATTEMPTS = 10
_MAX_SCALE = 8
_COMPILED = "compiling the decoder for windows of photographs for this machine: some seconds, once"


#: (data, top, left, height, width) -> RGB; None: libjpeg-turbo is to decode this one
WindowDecoder = Callable[[bytes, int, int, int, int], NDArray[np.uint8] | None]


class ImageError(ValueError):
    """These bytes are not an image that can be decoded."""


def _import_window_decoder() -> WindowDecoder | None:
    try:
        from podium.data.images.jpeg.window import decode_window
    except ImportError:
        return None
    return told_at_first(_COMPILED, decode_window)


_window_decoder = _import_window_decoder()


def set_window_decoder(on: bool) -> bool:
    """Decode with `jpeg/window.py` where it can (on), or always with libjpeg-turbo; return which it is from now on."""
    global _window_decoder
    _window_decoder = _import_window_decoder() if on else None
    return _window_decoder is not None


#: of the many that Pillow knows; for some of the others it starts programs, such as Ghostscript
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")


def image_size(data: bytes) -> tuple[int, int]:
    """Return (height, width), from the header alone."""
    frame = read_frame(data)
    if frame is not None:
        return frame.height, frame.width
    with _opened(data) as image:
        return image.height, image.width


def decode_crop(
    data: bytes, top: int, left: int, height: int, width: int, size: int, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Decode a window of an image as RGB and resize it to (size, size, 3): bilinear, averaging where it shrinks.

    The result is written into `out` if given. When decoding at a lower resolution, the edges of the window are those of
    the nearest pixels there.
    """
    scale = 1
    while scale < _MAX_SCALE and min(height, width) >= 2 * scale * size:
        scale *= 2
    if scale == 1 and _window_decoder is not None:
        window = _window_decoder(data, top, left, height, width)
        if window is not None:
            return resized(window, size, out)
    frame = read_frame(data)
    image = None if frame is None else _decode_jpeg(data, frame, top + height, scale)
    if image is None:
        image, scale = _decode_any(data), 1
    rows = _scaled(top, height, scale, image.shape[0])
    columns = _scaled(left, width, scale, image.shape[1])
    return resized(image[rows, columns], size, out)


def centre_crop(data: bytes, resize: int, size: int) -> NDArray[np.uint8]:
    """Return the middle (size, size, 3) of an image with its shorter side resized to `resize`, as for validation."""
    return decode_crop(data, *centre_window(*image_size(data), resize, size), size)


def centre_window(height: int, width: int, resize: int, size: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of what `centre_crop` shows, in whole pixels of the image."""
    side = min(height, width)
    side = max(1, min(side, round(side * size / resize)))
    return (height - side) // 2, (width - side) // 2, side, side


def resized(image: NDArray[np.uint8], size: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Resize an image (height, width, 3) to (size, size, 3), in `out` if given."""
    out = np.empty((size, size, 3), np.uint8) if out is None else out
    # Torch has a vectorised kernel for bytes with the channels last, which needs rows without gaps. The batch axis must
    # exist before the channels move, or the result is laid out with the channels first, at half the speed.
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].permute(0, 3, 1, 2)
    # The operator behind `torch.nn.functional.interpolate`, which takes no memory to write into.
    target = torch.from_numpy(out)[None].permute(0, 3, 1, 2)
    torch.ops.aten._upsample_bilinear2d_aa.out(pixels, (size, size), False, None, None, out=target)
    return out


# --------------------------------------------------------------------------------------------- decoding


def _decode_jpeg(data: bytes, frame: Frame, bottom: int, scale: int) -> NDArray[np.uint8] | None:
    """Decode rows 0 … `bottom` or more, at 1/scale of the resolution; None if libjpeg-turbo finds a fault."""
    height = rows_to_decode(bottom, frame.mcu_height, scale)
    # A file without an end marker may have lost rows: it is decoded whole, to find out.
    shorter = frame.sequential and height < frame.height and data.rfind(END_OF_IMAGE, frame.height_offset) >= 0
    given: bytes | bytearray = data
    if shorter:
        given = bytearray(data)
        struct.pack_into(">H", given, frame.height_offset, height)
    else:
        height = frame.height
    # Chosen such that no scale between two powers of two, for which there are no fast kernels, qualifies.
    least = (-(-height // scale), -(-frame.width // scale)) if scale > 1 else (0, 0)
    try:
        # Data after the last row of a shorter image causes a warning, and strict makes warnings errors.
        return simplejpeg.decode_jpeg(given, "RGB", min_height=least[0], min_width=least[1], strict=not shorter)
    except ValueError:
        return None


def _decode_any(data: bytes) -> NDArray[np.uint8]:
    with _opened(data) as image:
        try:
            return np.array(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError, IndexError, TypeError, struct.error) as error:
            raise ImageError(str(error)) from None


def _opened(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.UnidentifiedImageError:
        raise ImageError("it is not a JPEG, a PNG or another known kind of image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(str(error)) from None


def _scaled(start: int, length: int, scale: int, limit: int) -> slice:
    """Return where pixels start … start + length - 1 are at 1/scale of the resolution, with `limit` pixels in all."""
    first = min((start + scale // 2) // scale, limit - 1)
    end = min((start + length + scale // 2) // scale, limit)
    return slice(first, max(first + 1, end))


# --------------------------------------------------------------------------------------------- windows


def random_windows(
    stream: int,
    places: NDArray[np.int64],
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    boxes: Sequence[NDArray[np.floating] | None] | None = None,
    min_covered: float = 0.1,
) -> NDArray[np.int64]:
    """Draw windows (n, 4) of top, left, height, width in images of the given sizes; row i from (stream, places[i]).

    A window has a share of the image's `area` and a `ratio` of width to height, drawn uniformly (the ratio in its
    logarithm), anywhere in the image. A window that does not fit the image is drawn again, and so is one that covers
    less than `min_covered` of every one of the image's `boxes` (relative ymin, xmin, ymax, xmax; None or no rows: any
    window will do). After ten attempts, it is the largest window of an allowed ratio in the middle.
    """
    drawn = counter_rng.uniforms(stream, places, 4 * _ATTEMPTS).reshape(-1, _ATTEMPTS, 4)
    image_height, image_width = heights[:, None], widths[:, None]
    pixels = (area[0] + drawn[..., 0] * (area[1] - area[0])) * (image_height * image_width)
    low, high = map(math.log, ratio)
    shape = np.exp(low + drawn[..., 1] * (high - low))
    height = np.rint(np.sqrt(pixels / shape)).astype(np.int64)
    width = np.rint(np.sqrt(pixels * shape)).astype(np.int64)
    top = (drawn[..., 2] * (image_height - height + 1)).astype(np.int64)
    left = (drawn[..., 3] * (image_width - width + 1)).astype(np.int64)
    good = (height > 0) & (height <= image_height) & (width > 0) & (width <= image_width)
    attempts = np.stack([top, left, height, width], axis=-1)  # (n, attempts, 4)
    if boxes is not None:
        good &= _covers(attempts, heights, widths, boxes, min_covered)
    first = good.argmax(axis=1)
    rows = np.arange(len(places))
    windows = attempts[rows, first]
    failed = ~good[rows, first]
    if failed.any():
        windows[failed] = _middle_windows(heights[failed], widths[failed], ratio)
    return windows


def _middle_windows(
    heights: NDArray[np.int64], widths: NDArray[np.int64], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    height = np.clip(np.rint(widths / ratio[0]).astype(np.int64), 1, heights)
    width = np.clip(np.rint(heights * ratio[1]).astype(np.int64), 1, widths)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=-1)


def _covers(
    windows: NDArray[np.int64],
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    boxes: Sequence[NDArray[np.floating] | None],
    min_covered: float,
) -> NDArray[np.bool_]:
    """Return (n, attempts): whether a window covers enough of one of its image's boxes, or there are none to cover."""
    owner = np.repeat(np.arange(len(boxes)), [0 if some is None else len(some) for some in boxes])
    if len(owner) == 0:
        return np.ones(windows.shape[:2], np.bool_)
    box = np.concatenate([some for some in boxes if some is not None and len(some)]).astype(np.float64)
    box *= np.stack([heights, widths, heights, widths], axis=-1)[owner]
    box_area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    proper = box_area > 0
    owner, box_area, (y_min, x_min, y_max, x_max) = owner[proper], box_area[proper, None], box[proper].T[:, :, None]
    top, left, height, width = np.moveaxis(windows[owner], -1, 0)  # (boxes, attempts) each
    down = np.minimum(top + height, y_max) - np.maximum(top, y_min)
    across = np.minimum(left + width, x_max) - np.maximum(left, x_min)
    enough = np.clip(down, 0, None) * np.clip(across, 0, None) >= min_covered * box_area

    covers = np.ones(windows.shape[:2], np.bool_)
    covers[owner] = False
    covered_box, attempt = np.nonzero(enough)
    covers[owner[covered_box], attempt] = True
    return covers
