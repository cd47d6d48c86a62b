"""Copies of kernels of volumes, which lie in memory as their products need them, in the order of their axes. For
checkpoints; apart from `volumes.py`, as the compiler that makes it takes a while to load.

torch goes through memory at steps of megabytes, always into the same lines of the cache: for 134 MB of a kernel (1024,
512, 4, 4, 4), two cores, it takes 181 ms, and this 40.

    kernel (o, c, 4, 4, 4), k = 64 places of it
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.loops import compiled, on_cores

#: columns at a time, and elements between rows that keep these from sharing lines of the cache
_COLUMNS, _APART = 128, 8


def copy_kernel(kernel: Tensor, into: Tensor) -> None:
    """`into` is contiguous; `kernel` has its memory as (4, 4, 4, c, o)."""
    o, c = kernel.shape[:2]
    source = kernel.permute(2, 3, 4, 1, 0).view(-1, c, o).numpy()
    target = into.view(o, c, -1).numpy()
    on_cores(lambda first, last: _turned(source, target, first, last), c, torch.get_num_threads())


@compiled()
def _turned(source: NDArray, target: NDArray, first: int, last: int) -> None:
    """target[o, c, k] = source[k, c, o] for c in first … last - 1"""
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
