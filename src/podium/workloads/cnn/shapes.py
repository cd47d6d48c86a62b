"""Rendered images that need no download: ten classes of shapes and textures, 32 × 32 in colour.

Sample i is a function of (seed, i), from which its class, position, size, angle, two colours and noise are drawn.
"""

import numpy as np
from numpy.typing import NDArray

from podium.data.sources.arrays import ArraySource
from podium.machine import counter_rng

CLASSES = ("disc", "ring", "square", "triangle", "cross", "crescent", "stripes", "checks", "dots", "rays")
SIZE = 32
_BLOCK = 512
_EDGE = 1.5 * 2 / SIZE  # edges are about one and a half pixels wide

Plane = NDArray[np.floating]


def rendered(samples: range, seed: int) -> ArraySource:
    """Return the samples with these numbers, as `image` (32, 32, 3) bytes and `label`."""
    image = np.empty((len(samples), SIZE, SIZE, 3), np.uint8)
    label = np.empty(len(samples), np.int64)
    for first in range(0, len(samples), _BLOCK):
        numbers = np.arange(samples.start, samples.stop, dtype=np.int64)[first : first + _BLOCK]
        image[first : first + _BLOCK], label[first : first + _BLOCK] = render(numbers, seed)
    return ArraySource({"image": image, "label": label})


def render(samples: NDArray[np.int64], seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return (images, labels) of some samples; a sample does not depend on the others."""
    num = len(samples)
    uniform = counter_rng.uniforms(counter_rng.key("shapes", seed), samples, 16).astype(np.float32)
    label = np.minimum((uniform[:, 0] * len(CLASSES)).astype(np.int64), len(CLASSES) - 1)
    u, v = _turned(uniform[:, 1:5])
    mask = np.empty((num, SIZE, SIZE), np.float32)
    for number, shape in enumerate(_SHAPES):
        chosen = label == number
        mask[chosen] = shape(u[chosen], v[chosen], uniform[chosen, 5, None, None])
    ground, ink = _colours(uniform[:, 6:12])
    shade = (uniform[:, 12, None, None] - 0.5) * u * 0.3  # light falls from one side
    image = ground[:, None, None] + mask[..., None] * (ink - ground)[:, None, None] + shade[..., None]
    noise = counter_rng.words(counter_rng.key("shapes", "noise", seed), samples, SIZE * SIZE * 3 // 8).view(np.int8)
    strength = (0.02 + 0.13 * uniform[:, 13]) / 64
    image += noise.reshape(image.shape) * strength[:, None, None, None]
    return (np.clip(image, 0, 1) * 255).astype(np.uint8), label


def _turned(uniform: Plane) -> tuple[Plane, Plane]:
    """Return pixel coordinates in the frame of each shape: shifted, rotated, and in units of its size."""
    axis = (np.arange(SIZE, dtype=np.float32) + 0.5) * (2 / SIZE) - 1
    x = axis[None, None, :] - (uniform[:, 0, None, None] - 0.5) * 0.7
    y = axis[None, :, None] - (uniform[:, 1, None, None] - 0.5) * 0.7
    size = 0.38 + 0.37 * uniform[:, 2, None, None]
    angle = uniform[:, 3, None, None] * np.float32(2 * np.pi)
    cosine, sine = np.cos(angle) / size, np.sin(angle) / size
    return cosine * x + sine * y, cosine * y - sine * x


def _colours(uniform: Plane) -> tuple[Plane, Plane]:
    """Return two colours that are clearly different."""
    ground, ink = uniform[:, :3], uniform[:, 3:]
    apart = np.abs(ink - ground).max(axis=1, keepdims=True)
    return ground, np.where(apart < 0.35, (ground + 0.5) % 1, ink)


def _filled(distance: Plane) -> Plane:
    """Return 1 inside (distance below zero) and 0 outside, with a soft edge between."""
    return np.clip(0.5 - distance / (2 * _EDGE), 0, 1)


def _disc(u: Plane, v: Plane, _: Plane) -> Plane:
    return _filled(np.hypot(u, v) - 1)


def _ring(u: Plane, v: Plane, extra: Plane) -> Plane:
    return _filled(np.abs(np.hypot(u, v) - 0.78) - 0.14 - 0.12 * extra)


def _square(u: Plane, v: Plane, _: Plane) -> Plane:
    return _filled(np.maximum(np.abs(u), np.abs(v)) - 0.85)


def _triangle(u: Plane, v: Plane, _: Plane) -> Plane:
    return _filled(np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) - 0.55)


def _cross(u: Plane, v: Plane, extra: Plane) -> Plane:
    arm = 0.22 + 0.12 * extra
    upright = np.maximum(np.abs(u) - arm, np.abs(v) - 1)
    across = np.maximum(np.abs(v) - arm, np.abs(u) - 1)
    return _filled(np.minimum(upright, across))


def _crescent(u: Plane, v: Plane, extra: Plane) -> Plane:
    bite = np.hypot(u - 0.45 - 0.25 * extra, v) - 0.85
    return _filled(np.maximum(np.hypot(u, v) - 1, -bite))


def _stripes(u: Plane, v: Plane, extra: Plane) -> Plane:
    return 0.5 + 0.5 * np.sin((3.5 + 4 * extra) * u)


def _checks(u: Plane, v: Plane, extra: Plane) -> Plane:
    pitch = 2.8 + 3 * extra
    return np.clip(0.5 + 2 * np.sin(pitch * u) * np.sin(pitch * v), 0, 1)


def _dots(u: Plane, v: Plane, extra: Plane) -> Plane:
    pitch = 3.2 + 3 * extra
    return np.clip(2 * (np.cos(pitch * u) + np.cos(pitch * v) - 0.8), 0, 1)


def _rays(u: Plane, v: Plane, extra: Plane) -> Plane:
    return 0.5 + 0.5 * np.sin(np.round(4 + 4 * extra) * np.arctan2(v, u))


_SHAPES = (_disc, _ring, _square, _triangle, _cross, _crescent, _stripes, _checks, _dots, _rays)
