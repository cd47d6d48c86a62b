"""The most that this machine does in a second, measured: float32 products of matrices, and bytes to and from memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from podium.kernels.multiply import product_into

_SIZE, _NUM_PRODUCTS = 2048, 8
#: of each of three arrays: together far more than any cache
_ARRAY_BYTES, _NUM_SUMS = 128 << 20, 6


@dataclass(frozen=True)
class Peaks:
    """The best of several measurements, on the threads of this process."""

    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic limits rather than memory."""
        return self.flops_per_second / self.bytes_per_second


def measure_peaks(device: torch.device) -> Peaks:
    """Measure products of 2048 × 2048 matrices, by torch and by the kernel `products` where it is in use, and sums of
    arrays that no cache holds (two read, one written)."""

    def best(times: int, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    a, b, out = (torch.rand(_SIZE, _SIZE, device=device) for _ in range(3))
    product_s = best(_NUM_PRODUCTS, lambda: torch.mm(a, b, out=out))
    if device.type == "cpu":
        product_s = min(product_s, best(_NUM_PRODUCTS, lambda: product_into(out, a, b)))
    x, y, z = (torch.zeros(_ARRAY_BYTES // 4, device=device) for _ in range(3))
    sum_s = best(_NUM_SUMS, lambda: torch.add(x, y, out=z))
    return Peaks(2 * _SIZE**3 / product_s, 3 * _ARRAY_BYTES / sum_s)
