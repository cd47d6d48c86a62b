"""A periodic mesh: Fourier transforms in place, and cloud-in-cell interpolation between it and particles.

Owns everything that must give the same bits on any number of threads. Transforms are made of one-dimensional ones, each
computed by one thread; every cell sums its particles in the order of the lattice, whichever thread owns the cell.
Positions are lattice sites plus displacements, in cells: a displacement keeps its precision in a large box.

Shapes: N cells a side; particles (N, N, N) by lattice site; mesh (N, N, N), its modes (N, N, N/2 + 1).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from podium.machine.numba_loops import compiled, on_cores

Array = NDArray[np.float32]
#: Three components, each (N, N, N): separate, so that one can be freed before the others.
Components = list[Array]

#: Planes are transformed together up to this many cells: enough work per call, yet small enough for the caches.
BLOCK_CELLS = 2**16
_HALF, _ONE, _EIGHTH = np.float32(0.5), np.float32(1), np.float32(0.125)
# No freedom for the compiler, not even fused multiply-add: boxes are then the same on other processors too, as far as
# numpy's mathematical functions allow.
_compiled = compiled(error_model="numpy")
_inlined = njit(error_model="numpy", inline="always")


class Mesh:
    """N³ numbers that can be transformed to their modes and back, in the same memory."""

    def __init__(self, size: int, threads: int | None = None) -> None:
        assert size % 2 == 0
        self.size, self.threads = size, threads
        # Two more columns than cells, as the modes need them.
        self._buffer = np.zeros((size, size, size + 2), np.float32)

    @property
    def real(self) -> Array:
        return self._buffer[:, :, : self.size]

    @property
    def modes(self) -> NDArray[np.complex64]:
        return self._buffer.view(np.complex64)

    def to_modes(self) -> None:
        real, modes = torch.from_numpy(self.real), torch.from_numpy(self.modes)

        def planes(part: slice) -> None:
            modes[part] = torch.fft.rfftn(_own(real[part]), dim=(1, 2))

        self._in_blocks(planes)
        self._in_blocks(lambda part: _transform_x(modes[:, part], torch.fft.fft))

    def to_real(self) -> None:
        real, modes = torch.from_numpy(self.real), torch.from_numpy(self.modes)

        def planes(part: slice) -> None:
            real[part] = torch.fft.irfftn(_own(modes[part]), (self.size, self.size), dim=(1, 2))

        self._in_blocks(lambda part: _transform_x(modes[:, part], torch.fft.ifft))
        self._in_blocks(planes)

    def _in_blocks(self, run: Callable[[slice], None]) -> None:
        """Run over blocks of planes that do not depend on the number of threads: the library may choose its algorithm
        by the number of transforms."""
        length = min(self.size, max(1, BLOCK_CELLS // self.size**2))
        num_blocks = -(-self.size // length)

        def blocks(start: int, stop: int) -> None:
            for block in range(start, stop):
                run(slice(block * length, min((block + 1) * length, self.size)))

        on_cores(blocks, num_blocks, self.threads)

    def multiply(self, factor: Callable[[NDArray, NDArray, NDArray], NDArray]) -> None:
        """Multiply the modes by `factor(kx, ky, kz)`, called block by block, with k in radians per cell."""
        modes, full = self.modes, wave_numbers(self.size)
        half = np.abs(full[: self.size // 2 + 1])

        def planes(part: slice) -> None:
            modes[part] *= factor(full[part, None, None], full[None, :, None], half[None, None, :])

        self._in_blocks(planes)

    def copy_from(self, other: "Mesh") -> None:
        self._buffer[...] = other._buffer


def _own(part: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, whose alignment (on which the library may also depend) is always the same."""
    return part.clone(memory_format=torch.contiguous_format)


def _transform_x(columns: torch.Tensor, transform: Callable[..., torch.Tensor]) -> None:
    columns.copy_(transform(_own(columns), dim=0))


def wave_numbers(size: int) -> NDArray:
    """Return the wave numbers along an axis, in radians per cell, in the order of the modes."""
    return 2 * np.pi * np.fft.fftfreq(size)


def derivative_numbers(k: NDArray) -> NDArray:
    """Return k without the shortest wave, whose slope is zero at every cell: its derivative must not be imaginary."""
    return np.where(np.abs(k) > math.pi * (1 - 1e-9), 0.0, k)


def inverse_laplacian(kx: NDArray, ky: NDArray, kz: NDArray) -> NDArray:
    """Return -1/k², and 0 for the mean."""
    squared = kx**2 + ky**2 + kz**2
    return np.divide(-1.0, squared, out=np.zeros_like(squared), where=squared > 0)


def smooth(mesh: Mesh, width: float) -> None:
    """Smooth with a Gaussian of standard deviation `width` cells; input and output are in real space.

    This is the discrete Gaussian (Lindeberg 1990), whose transform is exp(-σ²(1 - cos k)) along each axis: unlike a
    sampled or truncated Gaussian it is positive everywhere, so that densities stay positive next to the highest peaks.
    """
    mesh.to_modes()
    mesh.multiply(lambda kx, ky, kz: np.exp(-(width**2) * (3 - np.cos(kx) - np.cos(ky) - np.cos(kz))))
    mesh.to_real()


# --------------------------------------------------------------------------------------------- particles and mesh


def deposit(displacement: Components, mesh: Mesh) -> None:
    """Compute the cloud-in-cell density of the particles on the mesh, with mean 1."""
    real = mesh.real
    _by_owner(lambda first, last: _deposit(*displacement, real, first, last), mesh)


def deposit_sheet(displacement: Components, values: Array | None, mesh: Mesh) -> None:
    """Deposit, times `values` if given, with the lattice refined to half its spacing by linear interpolation.

    Dark matter is a folded sheet in phase space, of which particles are samples; with samples between them as well,
    voids are smooth where single particles would leave holes. Sums over the mesh stay those of the particles.
    """
    real = mesh.real
    weighted = values is not None
    given = values if values is not None else displacement[0]
    _by_owner(lambda first, last: _deposit_sheet(*displacement, given, weighted, real, first, last), mesh)


def _by_owner(run: Callable[[int, int], None], mesh: Mesh) -> None:
    """Divide the planes of the mesh between threads, each of which goes through all particles."""
    on_cores(run, mesh.size, mesh.threads, parts_per_thread=1)


def kick_and_drift(displacement: Components, momentum: Components, potential: Mesh, kick: float, drift: float) -> None:
    """Apply momentum -= kick·∇potential at the particle's position, then displacement += drift·momentum."""
    real, factors = potential.real, (np.float32(kick), np.float32(drift))
    on_cores(
        lambda first, last: _kick_and_drift(*displacement, *momentum, real, *factors, first, last),
        potential.size,
        potential.threads,
    )


@_inlined
def _site(lattice, shift, size):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return a particle's cell and position in it; loops, as a remainder costs more than the rest of the deposit.

    Lattice sites lie halfway between mesh points. A cloud is then shared by both neighbours from the start, and the
    deposit is linear in small displacements; at a mesh point it would depend on their absolute value.
    """
    shift = shift + _HALF
    whole = math.floor(shift)
    cell = lattice + int(whole)
    while cell >= size:
        cell -= size
    while cell < 0:
        cell += size
    return cell, shift - np.float32(whole)


@_inlined
def _add_cloud(mesh, low, high, first, last, y, z, fx, fy, fz, mass):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add a cloud of one cell's size to those of its eight cells that lie in planes `first` to `last`."""
    size = mesh.shape[0]
    y_high = y + 1 if y + 1 < size else 0
    z_high = z + 1 if z + 1 < size else 0
    w00, w01 = (_ONE - fy) * (_ONE - fz) * mass, (_ONE - fy) * fz * mass
    w10, w11 = fy * (_ONE - fz) * mass, fy * fz * mass
    if first <= low < last:
        gx = _ONE - fx
        mesh[low, y, z] += gx * w00
        mesh[low, y, z_high] += gx * w01
        mesh[low, y_high, z] += gx * w10
        mesh[low, y_high, z_high] += gx * w11
    if first <= high < last:
        mesh[high, y, z] += fx * w00
        mesh[high, y, z_high] += fx * w01
        mesh[high, y_high, z] += fx * w10
        mesh[high, y_high, z_high] += fx * w11


@_compiled
def _deposit(dx, dy, dz, mesh, first, last):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Fill planes `first` to `last` of the mesh, going through all particles: cheap compared with depositing them."""
    size = dx.shape[0]
    for x in range(first, last):
        mesh[x] = np.float32(0)
    for i in range(size):
        for j in range(size):
            for k in range(size):
                low, fx = _site(i, dx[i, j, k], size)
                high = low + 1 if low + 1 < size else 0
                if first <= low < last or first <= high < last:
                    y, fy = _site(j, dy[i, j, k], size)
                    z, fz = _site(k, dz[i, j, k], size)
                    _add_cloud(mesh, low, high, first, last, y, z, fx, fy, fz, _ONE)


@_inlined
def _mean(field, i, i2, j, j2, k, k2):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    low = (field[i, j, k] + field[i, j, k2]) + (field[i, j2, k] + field[i, j2, k2])
    high = (field[i2, j, k] + field[i2, j, k2]) + (field[i2, j2, k] + field[i2, j2, k2])
    return (low + high) * _EIGHTH


@_compiled
def _deposit_sheet(dx, dy, dz, values, weighted, mesh, first, last):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    size = dx.shape[0]
    for x in range(first, last):
        mesh[x] = np.float32(0)
    for i in range(size):
        for j in range(size):
            for k in range(size):
                for corner in range(8):  # the site itself, and halfway to its neighbours along each axis and diagonal
                    on_x, on_y, on_z = corner & 1, (corner >> 1) & 1, corner >> 2
                    i2, j2, k2 = i + on_x, j + on_y, k + on_z
                    i2 = i2 if i2 < size else 0
                    j2 = j2 if j2 < size else 0
                    k2 = k2 if k2 < size else 0
                    shift = _mean(dx, i, i2, j, j2, k, k2) + _HALF * np.float32(on_x)
                    low, fx = _site(i, shift, size)
                    high = low + 1 if low + 1 < size else 0
                    if first <= low < last or first <= high < last:
                        y, fy = _site(j, _mean(dy, i, i2, j, j2, k, k2) + _HALF * np.float32(on_y), size)
                        z, fz = _site(k, _mean(dz, i, i2, j, j2, k, k2) + _HALF * np.float32(on_z), size)
                        mass = _mean(values, i, i2, j, j2, k, k2) if weighted else _ONE
                        _add_cloud(mesh, low, high, first, last, y, z, fx, fy, fz, mass * _EIGHTH)


@_inlined
def _slope(before, low, high, after, f):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Interpolate between the central differences at two neighbouring cells."""
    return _HALF * ((_ONE - f) * (high - before) + f * (after - low))


@_compiled
def _kick_and_drift(dx, dy, dz, px, py, pz, phi, kick, drift, first, last):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Move the particles of the lattice planes `first` to `last`.

    The gradient is interpolated with the weights of `_deposit`: forces between pairs are then equal and opposite, and
    the sum of momenta stays 0.
    """
    size = dx.shape[0]
    for i in range(first, last):
        for j in range(size):
            for k in range(size):
                x, fx = _site(i, dx[i, j, k], size)
                y, fy = _site(j, dy[i, j, k], size)
                z, fz = _site(k, dz[i, j, k], size)
                xs = x + 1 if x + 1 < size else 0
                ys = y + 1 if y + 1 < size else 0
                zs = z + 1 if z + 1 < size else 0
                xb, yb, zb = (x or size) - 1, (y or size) - 1, (z or size) - 1
                xa = xs + 1 if xs + 1 < size else 0
                ya = ys + 1 if ys + 1 < size else 0
                za = zs + 1 if zs + 1 < size else 0
                gx, gy, gz = _ONE - fx, _ONE - fy, _ONE - fz
                along_x = (
                    gy * gz * _slope(phi[xb, y, z], phi[x, y, z], phi[xs, y, z], phi[xa, y, z], fx)
                    + gy * fz * _slope(phi[xb, y, zs], phi[x, y, zs], phi[xs, y, zs], phi[xa, y, zs], fx)
                    + fy * gz * _slope(phi[xb, ys, z], phi[x, ys, z], phi[xs, ys, z], phi[xa, ys, z], fx)
                    + fy * fz * _slope(phi[xb, ys, zs], phi[x, ys, zs], phi[xs, ys, zs], phi[xa, ys, zs], fx)
                )
                along_y = (
                    gx * gz * _slope(phi[x, yb, z], phi[x, y, z], phi[x, ys, z], phi[x, ya, z], fy)
                    + gx * fz * _slope(phi[x, yb, zs], phi[x, y, zs], phi[x, ys, zs], phi[x, ya, zs], fy)
                    + fx * gz * _slope(phi[xs, yb, z], phi[xs, y, z], phi[xs, ys, z], phi[xs, ya, z], fy)
                    + fx * fz * _slope(phi[xs, yb, zs], phi[xs, y, zs], phi[xs, ys, zs], phi[xs, ya, zs], fy)
                )
                along_z = (
                    gx * gy * _slope(phi[x, y, zb], phi[x, y, z], phi[x, y, zs], phi[x, y, za], fz)
                    + gx * fy * _slope(phi[x, ys, zb], phi[x, ys, z], phi[x, ys, zs], phi[x, ys, za], fz)
                    + fx * gy * _slope(phi[xs, y, zb], phi[xs, y, z], phi[xs, y, zs], phi[xs, y, za], fz)
                    + fx * fy * _slope(phi[xs, ys, zb], phi[xs, ys, z], phi[xs, ys, zs], phi[xs, ys, za], fz)
                )
                px[i, j, k] -= kick * along_x
                py[i, j, k] -= kick * along_y
                pz[i, j, k] -= kick * along_z
                dx[i, j, k] += drift * px[i, j, k]
                dy[i, j, k] += drift * py[i, j, k]
                dz[i, j, k] += drift * pz[i, j, k]
