"""The linear theory of a flat universe of cold dark matter and a cosmological constant.

Expansion, growth and the power spectrum; the simulator starts from them, and its tests compare with them. Lengths are
comoving Mpc/h, wave numbers h/Mpc, times in 1/H₀.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


@dataclass(frozen=True)
class Cosmology:
    """Present-day parameters, close to those measured from the cosmic microwave background."""

    omega_matter: float = 0.31
    omega_baryon: float = 0.049
    hubble: float = 0.677
    spectral_index: float = 0.967
    sigma8: float = 0.81

    def expansion(self, a: Floats | float) -> Floats:
        """Return H(a)/H₀."""
        return np.sqrt(self.omega_matter / np.asarray(a) ** 3 + 1 - self.omega_matter)

    def matter_share(self, a: float) -> float:
        """Return the share of matter in the density at scale factor `a`."""
        return float(self.omega_matter / a**3 / self.expansion(a) ** 2)

    def growth(self, a: float) -> float:
        """Return the growing mode D(a), 1 today: 5Ωₘ/2·E ∫ da/(aE)³ (Heath 1977)."""
        return self._growing_mode(a) / self._growing_mode(1.0)

    def growth_rate(self, a: float) -> float:
        """Return d ln D / d ln a."""
        share, expansion = self.matter_share(a), float(self.expansion(a))
        return 2.5 * self.omega_matter / (a * expansion) ** 2 / self._growing_mode(a) - 1.5 * share

    def kick(self, start: float, stop: float) -> float:
        """Return ∫ dt/a between two scale factors: what a constant force adds to a² dx/dt."""
        return _integral(lambda a: 1 / (a**2 * self.expansion(a)), start, stop)

    def drift(self, start: float, stop: float) -> float:
        """Return ∫ dt/a² between two scale factors: what a constant a² dx/dt adds to x."""
        return _integral(lambda a: 1 / (a**3 * self.expansion(a)), start, stop)

    def power(self, k: Floats, a: float = 1.0) -> Floats:
        """Return P(k) of linear theory in (Mpc/h)³; 0 at k = 0."""
        return self._amplitude * self.growth(a) ** 2 * self._shape(k)

    def _growing_mode(self, a: float) -> float:
        # a = s²: the integrand is smooth in s, so that few nodes give almost full precision.
        integral = _integral(lambda s: 2 * s / (s**2 * self.expansion(s**2)) ** 3, 0.0, math.sqrt(a))
        return 2.5 * self.omega_matter * float(self.expansion(a)) * integral

    @cached_property
    def _amplitude(self) -> float:
        """Return the amplitude that gives the variance of the density in spheres of 8 Mpc/h."""
        log_k = np.linspace(math.log(1e-4), math.log(1e2), 8192)
        k = np.exp(log_k)
        x = 8.0 * k
        window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
        variance = np.trapezoid(self._shape(k) * window**2 * k**3, log_k) / (2 * math.pi**2)
        return self.sigma8**2 / float(variance)

    def _shape(self, k: Floats) -> Floats:
        """Return k^n·T² with the no-wiggle transfer function of Eisenstein & Hu (1998), equations 26 and 28 to 31."""
        omega, baryons = self.omega_matter * self.hubble**2, self.omega_baryon * self.hubble**2
        share = self.omega_baryon / self.omega_matter
        sound_horizon_mpc = 44.5 * math.log(9.83 / omega) / math.sqrt(1 + 10 * baryons**0.75)
        alpha = 1 - 0.328 * math.log(431 * omega) * share + 0.38 * math.log(22.3 * omega) * share**2
        damped = 1 + (0.43 * k * self.hubble * sound_horizon_mpc) ** 4
        gamma = self.omega_matter * self.hubble * (alpha + (1 - alpha) / damped)
        q = k * (2.7255 / 2.7) ** 2 / gamma
        log_term = np.log(2 * math.e + 1.8 * q)
        transfer = log_term / (log_term + (14.2 + 731 / (1 + 62.5 * q)) * q**2)
        return np.where(k > 0, k, 0) ** self.spectral_index * transfer**2


def _integral(function, start: float, stop: float) -> float:  # type: ignore[no-untyped-def]  # noqa: ANN001
    half = (stop - start) / 2
    return float(half * np.sum(_WEIGHTS * function(start + half * (_NODES + 1))))
