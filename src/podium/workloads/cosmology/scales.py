"""How fields are scaled in the files: to about [-1, 1], as the last layer of the model is a tanh.

    density       x = ln(ρ/ρ̄)/14         exp(14·x) gives the density back, in units of its mean
    temperature   x = ln(T/10⁴ K)/14      exp(14·x) gives the temperature back, in units of 10⁴ K
    velocity      x = v/(1000 km/s)       peculiar, proper

Densities and temperatures as published. Used by the simulator, the loss and `predict`.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

DENSITY_LOG = 14.0
#: Lower densities are raised to this: a cell without particles has no logarithm.
DENSITY_FLOOR = 1e-3
TEMPERATURE_LOG = 14.0
TEMPERATURE_UNIT_K = 1e4
VELOCITY_SCALE_KM_S = 1000.0

#: Channels of the two arrays, in order; each array is (channel, x, y, z).
NBODY_CHANNELS = ("density", "velocity x", "velocity y", "velocity z")
HYDRO_CHANNELS = ("baryon density", "temperature", "velocity x", "velocity y", "velocity z")

Values = TypeVar("Values", NDArray, torch.Tensor)


def to_density(x: Values) -> Values:
    """Convert values of a file or model to density in units of its mean."""
    if isinstance(x, torch.Tensor):
        return torch.exp(DENSITY_LOG * x)
    return np.exp(np.float32(DENSITY_LOG) * x)


def from_density(density: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert density in units of its mean to values of a file."""
    logarithm: NDArray[np.float32] = np.log(np.maximum(density, np.float32(DENSITY_FLOOR)))
    return logarithm / np.float32(DENSITY_LOG)


def to_temperature(x: Values) -> Values:
    """Convert values of a file or model to temperature in K."""
    if isinstance(x, torch.Tensor):
        return TEMPERATURE_UNIT_K * torch.exp(TEMPERATURE_LOG * x)
    return np.float32(TEMPERATURE_UNIT_K) * np.exp(np.float32(TEMPERATURE_LOG) * x)


def from_temperature(temperature_k: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert temperature in K to values of a file."""
    return np.log(temperature_k / np.float32(TEMPERATURE_UNIT_K)) / np.float32(TEMPERATURE_LOG)


def to_velocity(x: Values) -> Values:
    """Convert values of a file or model to velocity in km/s."""
    return x * VELOCITY_SCALE_KM_S


def from_velocity(velocity_km_s: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert velocity in km/s to values of a file."""
    return velocity_km_s / np.float32(VELOCITY_SCALE_KM_S)
