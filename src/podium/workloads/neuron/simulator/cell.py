"""The simulated cell: its free parameters, fixed physiology, and the current it receives. Pure data, no integration.

A conductance-based cell of four compartments. The axon initial segment and the two dendrites are attached to the soma:

    apical ── soma ── basal          C dV/dt = Σ g·(E − V) + Σ coupling·(V_neighbour − V) + I(t)
               │
              axon                   I(t) enters the soma

    soma    Na (m³h)  K (n⁴)              leak
    axon    Na (m³h)  K (n⁴)  M (p)       leak, fixed
    apical  T-type Ca (a²b)  Ih (r)       leak
    basal   A-type K (a⁴b)   Ih (r)       leak

Every gate x obeys dx/dt = (x∞(V) − x)/τ(V), with one voltage scale for both (Gate):

    u = exp(−(V − v_half)/(2·slope)),   x∞ = 1/(1 + u²),   τ = tau_min + (tau_max − tau_min)·2u/(1 + u²)

so τ is a bell around v_half that never falls below tau_min, and one exponential serves the whole gate.

Units everywhere: mV, ms, nA, µS, nF; densities in S/cm² and µF/cm², areas in µm².
`integrate.py` integrates this cell; the comparison with the NEURON simulator builds the same one from these tables.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.errors import UserError
from podium.machine import counter_rng

#: Increase whenever simulated numbers change for the same (seed, domain, sample); part of the keys of cached data.
VERSION = 2

PROBES = ("soma", "axon", "apical", "basal")
#: how the published names of parameters end, by compartment
_ENDINGS = {"soma": "som", "axon": "axn", "apical": "api", "basal": "den"}


@dataclass(frozen=True)
class Parameter:
    """One free parameter; unit value −1 is `low`, +1 is `high`, in between geometric (`log`) or linear."""

    name: str
    low: float
    high: float
    unit: str
    log: bool = True

    @property
    def published_name(self) -> str:
        """Return the name in the published form: what it is, a dot, and the ending of its compartment."""
        probe, _, quantity = self.name.partition("_")
        return f"{quantity}.{_ENDINGS[probe]}"


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("soma_gna", 0.02, 0.2, "S/cm2"),
    Parameter("soma_gk", 0.02, 0.2, "S/cm2"),
    Parameter("soma_gleak", 5e-5, 1e-3, "S/cm2"),
    Parameter("axon_gna", 0.2, 2.0, "S/cm2"),
    Parameter("axon_gk", 0.1, 1.0, "S/cm2"),
    Parameter("axon_gm", 0.003, 0.06, "S/cm2"),
    Parameter("axon_coupling", 0.03, 0.3, "uS"),
    Parameter("apical_gcat", 1e-4, 1.5e-3, "S/cm2"),
    Parameter("apical_gih", 2e-5, 4e-4, "S/cm2"),
    Parameter("apical_gleak", 2e-5, 2e-4, "S/cm2"),
    Parameter("apical_coupling", 0.01, 0.1, "uS"),
    Parameter("basal_gka", 1.5e-3, 3e-2, "S/cm2"),
    Parameter("basal_gih", 2e-5, 4e-4, "S/cm2"),
    Parameter("basal_gleak", 2e-5, 2e-4, "S/cm2"),
    Parameter("basal_coupling", 0.01, 0.1, "uS"),
)
NUM_PARAMETERS = len(PARAMETERS)


@dataclass(frozen=True)
class Gate:
    """Voltage dependence of one gate (equations above); a negative slope closes on depolarisation."""

    v_half: float
    slope: float
    tau_min: float
    tau_max: float
    power: int

    def steady(self, v: ArrayLike) -> NDArray[np.float64]:
        """Return x∞(V)."""
        return 1 / (1 + np.exp(-(np.asarray(v) - self.v_half) / self.slope))

    def tau(self, v: ArrayLike) -> NDArray[np.float64]:
        """Return τ(V) in ms."""
        return self.tau_min + (self.tau_max - self.tau_min) / np.cosh((np.asarray(v) - self.v_half) / (2 * self.slope))


@dataclass(frozen=True)
class Channel:
    """A density ḡ (a free parameter, or fixed in S/cm²) times its gates, towards a reversal potential in mV."""

    probe: str
    density: str | float
    reversal: float
    gates: tuple[Gate, ...] = ()


E_NA, E_K, E_CA, E_H, E_LEAK = 55.0, -90.0, 90.0, -40.0, -70.0

#: The order of the gates here is the order of the integrator's state.
CHANNELS: tuple[Channel, ...] = (
    Channel("soma", "soma_gna", E_NA, (Gate(-34.0, 7.0, 0.04, 0.20, 3), Gate(-60.0, -6.5, 0.40, 6.0, 1))),
    Channel("soma", "soma_gk", E_K, (Gate(-36.0, 11.0, 0.80, 3.0, 4),)),
    Channel("soma", "soma_gleak", E_LEAK),
    Channel("axon", "axon_gna", E_NA, (Gate(-42.0, 6.5, 0.04, 0.15, 3), Gate(-64.0, -6.5, 0.30, 5.0, 1))),
    Channel("axon", "axon_gk", E_K, (Gate(-42.0, 11.0, 0.50, 2.0, 4),)),
    Channel("axon", "axon_gm", E_K, (Gate(-42.0, 8.0, 3.0, 30.0, 1),)),
    Channel("axon", 2e-4, E_LEAK),
    Channel("apical", "apical_gcat", E_CA, (Gate(-50.0, 6.0, 0.50, 3.0, 2), Gate(-74.0, -5.5, 6.0, 20.0, 1))),
    Channel("apical", "apical_gih", E_H, (Gate(-82.0, -8.0, 5.0, 30.0, 1),)),
    Channel("apical", "apical_gleak", E_LEAK),
    Channel("basal", "basal_gka", E_K, (Gate(-48.0, 10.0, 0.30, 1.0, 4), Gate(-68.0, -7.0, 4.0, 12.0, 1))),
    Channel("basal", "basal_gih", E_H, (Gate(-82.0, -8.0, 5.0, 30.0, 1),)),
    Channel("basal", "basal_gleak", E_LEAK),
)

#: Membrane areas in µm² and capacitances in µF/cm².
AREAS = {"soma": 1200.0, "axon": 150.0, "apical": 6000.0, "basal": 4000.0}
CAPACITANCE = {"soma": 1.0, "axon": 1.0, "apical": 1.0, "basal": 1.0}

#: Every compartment is clamped at this voltage until t = 0, with gates at rest, and then released.
V_HOLD = -75.0

NUM_BINS = 1600
BIN_MS = 0.125  # 8 kHz
STIMULUS_UNIT = "nA"


def unit_parameters(seed: int, domain: str, samples: NDArray[np.int64]) -> NDArray[np.float32]:
    """Draw (n, 15) unit parameters in [−1, 1]; row i depends only on (seed, domain, samples[i])."""
    numbers = np.asarray(samples, dtype=np.int64)
    if numbers.ndim != 1 or (numbers.size and numbers.min() < 0):
        raise UserError("sample numbers of simulated cells must be a list of integers from 0")
    return (2 * counter_rng.uniforms(counter_rng.key("neuron", seed, domain), numbers, NUM_PARAMETERS) - 1).astype(
        np.float32
    )


def physical(unit: NDArray) -> NDArray[np.float32]:
    """Convert unit parameters to (n, 15) physical values, in the units of PARAMETERS."""
    fraction = (checked_unit(unit).astype(np.float64) + 1) / 2
    values = np.empty_like(fraction)
    for column, parameter in enumerate(PARAMETERS):
        low, high = parameter.low, parameter.high
        if parameter.log:
            values[:, column] = low * np.exp(fraction[:, column] * np.log(high / low))
        else:
            values[:, column] = low + fraction[:, column] * (high - low)
    return values.astype(np.float32)


def checked_unit(unit: NDArray) -> NDArray:
    """Return `unit` if it is (n, 15) finite numbers in [−1, 1]; raise UserError otherwise."""
    array = np.asarray(unit)
    if array.ndim != 2 or array.shape[1] != NUM_PARAMETERS:
        raise UserError(f"unit parameters must have shape (cells, {NUM_PARAMETERS}), not {array.shape}")
    if array.size and not (np.abs(array) <= 1).all():
        raise UserError("unit parameters must be finite numbers from -1 to 1")
    return array


def stimulus() -> NDArray[np.float64]:
    """Return the current into the soma at the sampling times, (1600,) in nA; linear in between."""
    time = np.arange(NUM_BINS) * BIN_MS
    knots = [
        # (ms, nA): each part is there to expose something
        (0.0, 0.0), (8.0, 0.0),  # release from V_HOLD: leaks and channels open at rest
        (8.125, -0.3), (33.0, -0.3),  # downwards: passive time constants, couplings, Ih
        (33.125, 0.05), (48.0, 0.05),  # rebound: T-type calcium, removal of Ih
        (48.125, 0.0), (65.0, 0.5),  # ramp: threshold, A- and M-type potassium
        (65.125, 0.0), (72.0, 0.0),
        (72.125, 1.5), (74.0, 1.5),  # brief and strong: one spike in nearly every cell, and what follows it
        (74.125, 0.0), (90.0, 0.0),
        (90.125, 0.5), (125.0, 0.5),  # step: a train, its adaptation
        (125.125, -0.2), (138.0, -0.2),
        (138.125, 0.25), (190.0, 0.25),  # carries the noise
        (190.125, 0.0), (200.0, 0.0),
    ]  # fmt: skip
    current = np.interp(time, *np.transpose(knots))
    noise = 2 * counter_rng.uniforms(counter_rng.key("neuron stimulus"), np.arange(NUM_BINS), 1)[:, 0] - 1
    slow = 0.0
    for k in range(NUM_BINS):
        slow += (noise[k] - slow) * BIN_MS / 2.0  # low-pass of 2 ms
        if 138.125 <= time[k] <= 190.0:
            current[k] += 3.0 * slow
    return np.round(current, 4)
