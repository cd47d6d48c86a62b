"""Pictures made for tests, as the bytes of their files."""

import io

import numpy as np
import simplejpeg
from PIL import Image


def photo(height: int, width: int, seed: int = 0, noise: float = 4.0, grain: int = 24) -> np.ndarray:
    """Something like a photograph: smooth colours, a few edges, some noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.float64)
    image[height // 3 : height // 2, width // 4 : width // 2] *= 0.5
    return np.clip(image + rng.normal(0, noise, image.shape), 0, 255).astype(np.uint8)


def encoded(image: np.ndarray, subsampling: str = "420", quality: int = 90) -> bytes:
    if subsampling == "gray":
        return simplejpeg.encode_jpeg(image[..., :1].copy(), quality, "GRAY", "gray")
    return simplejpeg.encode_jpeg(image, quality, "RGB", subsampling)


def saved(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
