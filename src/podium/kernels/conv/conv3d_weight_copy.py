"""Copies of 3-D convolution kernels from the memory order that their products need into the order of their axes. Used
for checkpoints; separate from `conv3d_stride2.py` because the compiler behind this takes a while to load.

torch steps through memory in strides of megabytes, which always hit the same cache lines: for a kernel (1024, 512, 4,
4, 4) of 134 MB, two cores, it takes 181 ms, and this 40.

    kernel (o, c, 4, 4, 4), k indexes its 64 taps
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.machine.numba_loops import compiled, on_cores

#: columns at a time, and elements between rows that keep them from sharing cache lines
_COLUMNS, _APART = 128, 8


def copy_kernel(kernel: Tensor, into: Tensor) -> None:
    """Copy `kernel`, whose memory order is (4, 4, 4, c, o), into the contiguous `into`."""
    o, c = kernel.shape[:2]
    source = kernel.permute(2, 3, 4, 1, 0).view(-1, c, o).numpy()
    target = into.view(o, c, -1).numpy()
    on_cores(lambda first, last: _turned(source, target, first, last), c, torch.get_num_threads())


@compiled()
def _turned(source: NDArray, target: NDArray, first: int, last: int) -> None:
    """Set target[o, c, k] = source[k, c, o] for c in first … last - 1."""
    num_places, _, num_out = source.shape
    rows = np.empty((num_places, _COLUMNS + _APART), source.dtype)
    for c in range(first, last):
        for start in range(0, num_out, _COLUMNS):
            stop = min(start + _COLUMNS, num_out)
            for k in range(num_places):
                rows[k, : stop - start] = source[k, c, start:stop]
            for o in range(start, stop):
                for k in range(num_places):
                    target[o, c, k] = rows[k, o - start]
