"""Copies crops of periodic boxes and rotates or reflects them on the way: machine code for `crops.py`.

A box is (channel, x, y, z) with the same number of cells along every axis; a crop begins anywhere and wraps around. A
*symmetry* is one of the 48 rotations and reflections of a cube: axis k of the result runs along axis `axes[k]` of the
box, backwards where `flips[k]`. Vectors are transformed with the box: the component along axis k is the one along
`axes[k]`, with the opposite sign where `flips[k]`.

Every number is read once and written once, in its place. Rows of the box lie along z. Where z is not the last axis of
the result, _LANES rows go through a buffer that stays in the first-level cache, so that whole cache lines are read and
written.
"""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from podium.machine.numba_loops import compiled

_LANES = 16  # floats of a cache line


class Symmetry(NamedTuple):
    """For each axis of the result: the axis of the box it runs along, and whether backwards."""

    axes: tuple[int, ...]
    flips: tuple[bool, ...]


#: all 48; the first changes nothing
SYMMETRIES = tuple(
    Symmetry(axes, flips) for axes in permutations(range(3)) for flips in product((False, True), repeat=3)
)
#: the 24 of the published cosmology training: for each order of the axes, the axes of the result that run backwards.
#: Meant as the rotations, but two in each order that swaps axes, and one in each that cycles them, are reflections.
PUBLISHED = tuple(
    Symmetry(axes, tuple(name in backwards for name in "xyz"))
    for axes, all_backwards in (
        ((0, 1, 2), ("", "xy", "xz", "yz")),
        ((1, 0, 2), ("x", "xz", "y", "yz")),
        ((2, 1, 0), ("x", "xy", "z", "yz")),
        ((0, 2, 1), ("y", "xy", "z", "xz")),
        ((1, 2, 0), ("xy", "yz", "xz", "xyz")),
        ((2, 0, 1), ("xy", "xz", "yz", "xyz")),
    )
    for backwards in all_backwards
)


def transformed_channels(
    num_channels: int, vectors: Sequence[tuple[int, int, int]], symmetry: Symmetry
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return for every channel of the result the channel of the box it comes from, and its sign."""
    channels, signs = np.arange(num_channels), np.ones(num_channels, np.float32)
    for components in vectors:
        for component, axis, flipped in zip(components, *symmetry, strict=True):
            channels[component] = components[axis]
            signs[component] = -1 if flipped else 1
    return channels, signs


def copy_crop(
    box: NDArray,
    start: Sequence[int],
    symmetry: Symmetry,
    channels: NDArray[np.int64],
    signs: NDArray[np.float32],
    out: NDArray,
) -> None:
    """Write signs[c] · the crop of box[channels[c]] that begins at `start`, rotated or reflected, to out[c].

    `box` (channels, N, N, N) of float16 or float32 and `out` (channels, crop, crop, crop) of float32 are contiguous.
    """
    num_channels, size = box.shape[:2]
    crop = out.shape[-1]
    # The compiled loop checks no bounds.
    assert box.flags.c_contiguous
    assert box.shape == (num_channels, size, size, size)
    assert crop <= size
    assert out.flags.c_contiguous
    assert out.dtype == np.float32
    assert out.shape == (len(channels), crop, crop, crop)
    assert channels.min() >= 0
    assert channels.max() < num_channels
    assert all(0 <= first < size for first in start)
    strides = np.empty(3, np.int64)  # in `out`, of a step along each axis of the box
    first = 0
    for axis, flipped, stride in zip(*symmetry, (crop * crop, crop, 1), strict=True):
        strides[axis] = -stride if flipped else stride
        first += (crop - 1) * stride if flipped else 0
    # One type for the compiler, whether or not the box may be written to; half-precision numbers as their bits.
    numbers = box.reshape(-1).view(np.uint16 if box.dtype == np.float16 else box.dtype)
    numbers.flags.writeable = False
    _copy(numbers, size, np.asarray(start, np.int64), channels, signs, out.reshape(-1), crop, first, strides)


# ------------------------------------------------------------------------------------------------- compiled


def _float(stored: Any) -> Any:
    """Return a stored number as float32: it is one, or the bits of a float16."""


@overload(_float)
def _float_of(stored):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if stored == types.uint16:
        return _widened
    return lambda stored: stored


# Exponent and mantissa move to where a float32 has them; the exponents' biases differ by 112. A product, so that
# subnormal numbers come out right too; infinity and NaN keep the highest exponent.
_BIAS = np.float32(2.0**112)


def _widened(stored):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    bits = np.uint32(stored)
    magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    value = np.float32(magnitude.view(np.float32) * _BIAS).view(np.uint32)
    if magnitude >= np.uint32(0x0F800000):
        value = np.uint32(magnitude | np.uint32(0x7F800000))
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(value | sign).view(np.float32)


@compiled(error_model="numpy")
def _copy(box, size, start, channels, signs, out, crop, first, strides):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Copy cell (x, y, z) of the crop, in the box's frame, to out[first + Σ strides · (x, y, z)]; both are flat."""
    run = min(crop, size - start[2])  # cells of a row before it wraps around
    step = strides[2]
    # The axis of the box that becomes the last one, and the other: x and y where z stays last.
    lane_axis = 1 if abs(strides[1]) == 1 else 0
    other_axis = 1 - lane_axis
    lane_cells, other_cells = (size, size * size) if lane_axis == 1 else (size * size, size)
    rows = np.empty(crop * _LANES, box.dtype)
    for channel in range(len(channels)):
        sign = signs[channel]
        corner = channels[channel] * size * size * size
        target = first + channel * crop * crop * crop
        for other in range(crop):
            plane = corner + (start[other_axis] + other) % size * other_cells
            onto = target + other * strides[other_axis]
            if abs(step) == 1:
                for lane in range(crop):
                    row = plane + (start[lane_axis] + lane) % size * lane_cells
                    place = onto + lane * strides[lane_axis]
                    for begin, count, at in ((row + start[2], run, place), (row, crop - run, place + run * step)):
                        line = box[begin : begin + count]
                        if step == 1:
                            written = out[at : at + count]
                            for t in range(count):
                                written[t] = sign * _float(line[t])
                        else:
                            written = out[at - count + 1 : at + 1]
                            for t in range(count):
                                written[np.uint64(count - 1 - t)] = sign * _float(line[t])
            else:
                for group in range(0, crop, _LANES):
                    width = min(_LANES, crop - group)
                    for lane in range(width):
                        # In the order in which they are written
                        cell = group + lane if strides[lane_axis] == 1 else crop - 1 - group - lane
                        row = plane + (start[lane_axis] + cell) % size * lane_cells
                        buffer = rows[lane * crop : (lane + 1) * crop]
                        line = box[row + start[2] : row + start[2] + run]
                        for t in range(run):
                            buffer[t] = line[t]
                        line = box[row : row + crop - run]
                        for t in range(crop - run):
                            buffer[run + t] = line[t]
                    place = onto + group if strides[lane_axis] == 1 else onto - (crop - 1) + group
                    for t in range(crop):
                        column = rows[t:]
                        written = out[place + t * step : place + t * step + width]
                        for lane in range(width):
                            written[lane] = sign * _float(column[lane * crop])
