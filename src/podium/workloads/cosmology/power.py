"""Power spectrum of a field in a periodic box, for tests of the simulator and to compare predictions with targets."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def power_spectrum(field: NDArray, box: float) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return k, P(k) and the number of modes, in shells one fundamental mode 2π/box wide, up to the Nyquist limit.

    `field` is (N, N, N) and periodic; its mean does not matter. k is the mean of the modes in a shell, in units of
    1/box; P in units of box³ (a density contrast has no unit of its own).
    """
    size = len(field)
    assert field.shape == (size, size, size)
    modes = np.fft.rfftn(np.asarray(field, np.float32))
    full = np.fft.fftfreq(size, 1 / size)
    half = np.arange(size // 2 + 1)
    # The transform holds one of k and −k; the planes that are their own mirror images hold both.
    own_mirror = (half == 0) | (2 * half == size)
    counts = np.broadcast_to(np.where(own_mirror, 1, 2), modes.shape)
    num_shells = size // 2
    num_modes = np.zeros(num_shells + 1, np.int64)
    length, power = np.zeros(num_shells + 1), np.zeros(num_shells + 1)
    for x in range(size):
        k = np.sqrt(full[x] ** 2 + full[:, None] ** 2 + half[None, :] ** 2)
        shell = np.rint(k).astype(np.int64)
        inside = shell <= num_shells
        shell, count = shell[inside], counts[x][inside]
        squared = np.abs(modes[x][inside]).astype(np.float64) ** 2
        num_modes += np.bincount(shell, count, num_shells + 1).astype(np.int64)
        length += np.bincount(shell, count * k[inside], num_shells + 1)
        power += np.bincount(shell, count * squared, num_shells + 1)
    found = slice(1, None)
    k_mean = 2 * np.pi / box * length[found] / num_modes[found]
    return k_mean, power[found] / num_modes[found] * box**3 / float(size) ** 6, num_modes[found]
