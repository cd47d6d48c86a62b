"""Dark matter from Gaussian noise to redshift 3: second-order perturbation theory first, then a particle mesh.

Comoving lengths are in cells and times in 1/H₀. With p = a² dx/dt the equations of motion are

    dx/dt = p/a²        dp/dt = -∇Φ/a        ∇²Φ = 3/2 Ωₘ δ

solved by leapfrog (kick, drift, kick), Φ by Fourier transforms of the cloud-in-cell density. One particle per cell.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podium.machine.counter_rng import key, uniforms
from podium.machine.numba_loops import on_cores
from podium.workloads.cosmology.simulator.linear import Cosmology
from podium.workloads.cosmology.simulator.mesh import (
    Components,
    Mesh,
    deposit,
    derivative_numbers,
    inverse_laplacian,
    kick_and_drift,
)

START = 1 / 50  # scale factors: redshift 49, where second order is still exact to a few parts in a thousand
STOP = 1 / 4  # redshift 3
NUM_STEPS = 48


@dataclass
class Particles:
    """One particle per lattice site, at scale factor `a`."""

    displacement: Components  # cells
    momentum: Components  # a² dx/dt, cells·H₀
    a: float


def initial(
    cosmology: Cosmology, size: int, cell_mpc: float, *, seed: int, a: float = START, threads: int | None = None
) -> Particles:
    """Create the particles of a Gaussian field with the linear power spectrum, displaced to second order."""
    potential = Mesh(size, threads)
    _fill_noise(potential, seed)
    potential.to_modes()
    # White noise has power 1 per mode and cell: ⟨|δₖ|²⟩ = P N⁶/V in the transform's own units.
    growth, cell_volume = cosmology.growth(a), cell_mpc**3

    def linear(kx: NDArray, ky: NDArray, kz: NDArray) -> NDArray:
        k = np.sqrt(kx**2 + ky**2 + kz**2) / cell_mpc
        return growth * np.sqrt(cosmology.power(k) / cell_volume) * inverse_laplacian(kx, ky, kz)

    potential.multiply(linear)
    return displaced(cosmology, potential, a)


def displaced(cosmology: Cosmology, potential: Mesh, a: float) -> Particles:
    """Return particles displaced by the modes of φ with ∇²φ = δ at scale factor `a`.

    x = q - ∇φ - 3/7 Ωₘ^(-1/143) ∇φ₂ with ∇²φ₂ = Σ φᵢᵢφⱼⱼ - φᵢⱼ² (Bouchet et al. 1995).
    """
    size, threads = potential.size, potential.threads
    second = _second_order_source(potential)
    second.to_modes()
    second.multiply(inverse_laplacian)
    share, expansion = cosmology.matter_share(a), float(cosmology.expansion(a))
    factor = 3 / 7 * share ** (-1 / 143)
    rate, second_rate = cosmology.growth_rate(a), 2 * share ** (6 / 11)
    slope = Mesh(size, threads)
    displacement: Components = []
    momentum: Components = []
    for axis in range(3):
        _derive(potential, slope, axis)
        displacement.append(-slope.real)
        momentum.append(displacement[-1] * np.float32(a**2 * expansion * rate))
        _derive(second, slope, axis)
        slope.real[...] *= np.float32(-factor)
        displacement[-1] += slope.real
        slope.real[...] *= np.float32(a**2 * expansion * second_rate)
        momentum[-1] += slope.real
    return Particles(displacement, momentum, a)


def evolve(
    cosmology: Cosmology,
    particles: Particles,
    stop: float = STOP,
    *,
    num_steps: int = NUM_STEPS,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Evolve the particles to scale factor `stop`."""
    # Equal steps in √a: finer in ln a towards the end, when particles cross a cell in a fraction of the expansion time.
    times = [float(s) ** 2 for s in np.linspace(math.sqrt(particles.a), math.sqrt(stop), num_steps + 1)]
    times[0], times[-1] = particles.a, stop
    mesh = Mesh(len(particles.displacement[0]), threads)
    half_kick = 0.0  # still due from the step before
    for step, a in enumerate(times):
        _to_potential(cosmology, particles, mesh)
        next_half, drift = 0.0, 0.0
        if step < num_steps:
            middle = (a + times[step + 1]) / 2
            next_half, drift = cosmology.kick(a, middle), cosmology.drift(a, times[step + 1])
        kick_and_drift(particles.displacement, particles.momentum, mesh, half_kick + next_half, drift)
        if step < num_steps:
            half_kick = cosmology.kick(middle, times[step + 1])
        if progress is not None:
            progress((step + 1) / (num_steps + 1))
    particles.a = stop


def _to_potential(cosmology: Cosmology, particles: Particles, mesh: Mesh) -> None:
    deposit(particles.displacement, mesh)
    mesh.to_modes()
    strength = 1.5 * cosmology.omega_matter

    def solve(kx: NDArray, ky: NDArray, kz: NDArray) -> NDArray:
        # Compensates the mesh to second order in k, bounded at the shortest waves: for the clouds by which density is
        # deposited and forces are interpolated (the windows), and for differences instead of derivatives.
        sines = [np.square(np.sin(k / 2)) for k in (kx, ky, kz)]  # k²/4 for long waves
        window_x, window_y, window_z = (1 - 2 / 3 * sine for sine in sines)
        square = sines[0] + sines[1] + sines[2]
        fourth = sines[0] ** 2 + sines[1] ** 2 + sines[2] ** 2
        weakened = 12 * square**2 * (window_x * window_y * window_z)
        return np.divide(
            -strength * (3 * square + fourth), weakened, out=np.zeros_like(weakened), where=weakened > 0
        ).astype(np.float32)

    mesh.multiply(solve)
    mesh.to_real()


def _fill_noise(mesh: Mesh, seed: int) -> None:
    """Fill the mesh with normally distributed numbers, each a function of (seed, cell)."""
    size, stream = mesh.size, key("cosmology", seed)
    pairs = size * size // 2

    def planes(start: int, stop: int) -> None:
        for x in range(start, stop):
            u = uniforms(stream, np.arange(x * pairs, (x + 1) * pairs), 2)
            radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), 2 * np.pi * u[:, 1]
            plane = mesh.real[x]
            plane[: size // 2] = (radius * np.cos(angle)).reshape(-1, size)
            plane[size // 2 :] = (radius * np.sin(angle)).reshape(-1, size)

    on_cores(planes, size, mesh.threads)


def _derive(source: Mesh, out: Mesh, *axes: int) -> None:
    """Differentiate the field with the modes of `source` along each of `axes` in turn; the result is in real space."""
    out.copy_from(source)

    def factor(kx: NDArray, ky: NDArray, kz: NDArray) -> NDArray:
        k = (kx, ky, kz)
        if len(axes) == 2 and axes[0] == axes[1]:
            return -np.square(k[axes[0]])
        product = np.asarray(1.0 + 0.0j)
        for axis in axes:
            product = product * (1j * derivative_numbers(k[axis]))
        return product.astype(np.complex64)

    out.multiply(factor)
    out.to_real()


def _second_order_source(potential: Mesh) -> Mesh:
    """Return Σ φᵢᵢφⱼⱼ - φᵢⱼ² over pairs of axes, in real space; uses at most four meshes at a time."""
    size, threads = potential.size, potential.threads
    source, xx, yy, zz = (Mesh(size, threads) for _ in range(4))
    for axis, out in enumerate((xx, yy, zz)):
        _derive(potential, out, axis, axis)
    source.real[...] = xx.real * yy.real
    xx.real[...] += yy.real
    xx.real[...] *= zz.real
    source.real[...] += xx.real
    for i, j in ((0, 1), (0, 2), (1, 2)):
        _derive(potential, xx, i, j)
        xx.real[...] *= xx.real
        source.real[...] -= xx.real
    return source
