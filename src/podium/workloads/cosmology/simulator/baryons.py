"""Gas in the field of the dark matter: pressure-smoothed density, temperature, velocity.

No hydrodynamics is solved. Gas follows the dark matter down to the scale at which its pressure resists, has the
temperature that ultraviolet light and expansion give it at its density, and is heated where it converges along an axis
faster than space expands: to the temperature behind a strong shock (Rankine-Hugoniot) of that speed.
"""

import math
from dataclasses import dataclass

import numpy as np

from podium.machine.numba_loops import on_cores
from podium.workloads.cosmology.simulator.linear import Cosmology
from podium.workloads.cosmology.simulator.mesh import Array, Mesh, smooth

#: Temperature of gas at the mean density, and how it rises with density: T = T₀ (ρ/ρ̄)^(γ - 1).
MEAN_TEMPERATURE_K = 1.2e4
ADIABATIC_SLOPE = 0.55
#: No gas in these boxes is hotter or colder: numerical bounds, not physical ones.
TEMPERATURE_BOUNDS_K = (1e2, 1e9)
#: Mean particle mass of fully ionised hydrogen and helium, in proton masses.
MOLECULAR_WEIGHT = 0.6
#: m_p/k_B in K/(km/s)²
_PROTON_OVER_BOLTZMANN = 121.15
#: By redshift 3 pressure has smoothed the gas over less than the Jeans length: it was cold until it was ionised, and
#: sound has travelled only this far since (Gnedin & Hui 1998).
_FILTERING = 0.6
#: Over how many pressure scales a flow converges into a shock, and over how many the heat spreads from it.
_SHOCK_WIDTHS = 4.0
_HEAT_WIDTHS = 2.0


@dataclass(frozen=True)
class Gas:
    """Scales of the gas in a box, in its own units."""

    #: standard deviation of the Gaussian that models smoothing by pressure, comoving Mpc/h
    pressure_mpc: float
    cell_mpc: float
    #: speed at which space expands, km/s per comoving Mpc/h
    expansion: float

    @property
    def pressure_cells(self) -> float:
        return self.pressure_mpc / self.cell_mpc

    @property
    def shock_mpc(self) -> float:
        """Return the length over which a convergence becomes a speed; at least what the mesh resolves."""
        return _SHOCK_WIDTHS * max(self.pressure_mpc, self.cell_mpc)

    @property
    def heat_cells(self) -> float:
        return _HEAT_WIDTHS * max(self.pressure_cells, 1.0)


def gas(cosmology: Cosmology, a: float, cell_mpc: float) -> Gas:
    """Compute the scales; pressure acts over the Jeans length / 2π at T₀: cₛ/(a √(4πGρ̄)) = cₛ/(aH √(3Ωₘ(a)/2))."""
    sound_km_s = math.sqrt(5 / 3 * MEAN_TEMPERATURE_K / (MOLECULAR_WEIGHT * _PROTON_OVER_BOLTZMANN))
    expansion = 100 * a * float(cosmology.expansion(a))
    pressure_mpc = _FILTERING * sound_km_s / (expansion * math.sqrt(1.5 * cosmology.matter_share(a)))
    return Gas(pressure_mpc, cell_mpc, expansion)


def density(dark_matter: Array, scales: Gas, out: Mesh) -> None:
    """Compute the density of the gas in units of its mean, into `out`."""
    out.real[...] = dark_matter
    smooth(out, scales.pressure_cells)
    np.maximum(out.real, np.float32(1e-6), out=out.real)  # a sum of positive numbers, but for rounding


def add_divergence(velocity: Array, axis: int, scales: Gas, out: Array, threads: int | None = None) -> None:
    """Add the derivative of one component along its own axis, in km/s per comoving Mpc/h."""
    size, half = len(velocity), np.float32(0.5 / scales.cell_mpc)

    def planes(start: int, stop: int) -> None:
        for x in range(start, stop):
            if axis == 0:
                difference = velocity[(x + 1) % size] - velocity[x - 1]
            else:
                plane = velocity[x]
                difference = np.roll(plane, -1, axis - 1) - np.roll(plane, 1, axis - 1)
            out[x] += half * difference

    on_cores(planes, size, threads)


def temperature(gas_density: Array, divergence: Array, scales: Gas, mesh: Mesh, weight: Mesh) -> Array:
    """Compute the temperature in K in place of `divergence`; `mesh` and `weight` are overwritten.

    Heat is spread by mass, so that the energy of a shock is conserved.
    """
    # Post-shock temperature 3/16 μ m_p v²/k_B at the speed v of convergence in excess of the expansion of space.
    strength = np.float32(3 / 16 * MOLECULAR_WEIGHT * _PROTON_OVER_BOLTZMANN)
    length, expansion = np.float32(scales.shock_mpc), np.float32(scales.expansion)
    low, high = map(np.float32, TEMPERATURE_BOUNDS_K)

    def heat(start: int, stop: int) -> None:
        for x in range(start, stop):
            speed = length * np.maximum(-divergence[x] - expansion, 0)
            mesh.real[x] = gas_density[x] * strength * speed * speed
            weight.real[x] = gas_density[x]

    def total(start: int, stop: int) -> None:
        for x in range(start, stop):
            shock = np.maximum(mesh.real[x], 0) / np.maximum(weight.real[x], np.float32(1e-6))
            photoionised = np.float32(MEAN_TEMPERATURE_K) * gas_density[x] ** np.float32(ADIABATIC_SLOPE)
            divergence[x] = np.clip(photoionised + shock, low, high)

    on_cores(heat, mesh.size, mesh.threads)
    smooth(mesh, scales.heat_cells)
    smooth(weight, scales.heat_cells)
    on_cores(total, mesh.size, mesh.threads)
    return divergence
