"""Integrates many simulated cells at once. `cell.py` describes the cell.

The scheme is second order in the time step and staggered: gates are at half steps, voltages at whole ones.

    gates     x(t+Δ/2) from x(t−Δ/2) with V(t), Crank–Nicolson:  x += Δ·(x∞ − x)/(τ + Δ/2)
    voltages  V(t+Δ) from V(t) with the gates and the current at t+Δ/2, Crank–Nicolson; the tree of four
              compartments is eliminated directly, leaves into the soma and back

Cells are processed in blocks of BLOCK, the last one padded, so that every cell uses the same vector instructions: the
bits of its voltages do not depend on the other cells or on the number of threads.
"""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from podium.machine.numba_loops import compiled, on_cores
from podium.workloads.neuron.simulator.cell import (
    AREAS,
    BIN_MS,
    CAPACITANCE,
    CHANNELS,
    E_CA,
    E_H,
    E_K,
    E_LEAK,
    E_NA,
    NUM_BINS,
    PARAMETERS,
    PROBES,
    V_HOLD,
    physical,
    stimulus,
)

STEPS_PER_BIN = 20  # Δ = 1/160 ms
BLOCK = 32  # cells; a multiple of every vector width, and the state of a block stays in the first-level cache

# Offset of each row of a block's state and conductances. Unsigned: an index that cannot be negative lets the compiler
# see that rows do not overlap, which vectorisation needs.
_CELLS = np.uint64(BLOCK)
(
    V_SOMA, V_AXON, V_APICAL, V_BASAL,
    SOMA_M, SOMA_H, SOMA_N,
    AXON_M, AXON_H, AXON_N, AXON_P,
    APICAL_A, APICAL_B, APICAL_R,
    BASAL_A, BASAL_B, BASAL_R,
) = (np.uint64(row * BLOCK) for row in range(17))  # fmt: skip
(
    SOMA_NA, SOMA_K, SOMA_LEAK,
    AXON_NA, AXON_K, AXON_M_TYPE, AXON_LEAK, AXON_COUPLING,
    APICAL_CA, APICAL_IH, APICAL_LEAK, APICAL_COUPLING,
    BASAL_K, BASAL_IH, BASAL_LEAK, BASAL_COUPLING,
) = (np.uint64(row * BLOCK) for row in range(16))  # fmt: skip

# 2^f for |f| ≤ 1/2 within 2.2e-7, highest power first: least squares of the relative error at Chebyshev nodes.
_P5, _P4, _P3, _P2, _P1, _P0 = (
    np.float32(c) for c in (0.001326697, 0.00967546, 0.055507425, 0.24022122, 0.69314694, 1.0000001)
)
_ROUND = np.float32(3 << 22)  # adding it puts a float's integer part into its low bits
_MANTISSA_BITS = np.int32(23)
_ONE, _TWO = np.float32(1), np.float32(2)


# Only fused multiply-add is allowed: any other freedom (approximate reciprocals, reordered sums) would make the
# voltages depend on the processor. `numpy` as error model: a test for division by zero would prevent vectorisation.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}
_inlined = njit(**_OPTIONS)


@_inlined
def _exp2(y):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return 2^y for |y| < 126, in operations that vectorise; the library's exp would be called cell by cell."""
    shifted = y + _ROUND
    f = y - (shifted - _ROUND)
    p = np.float32(((((_P5 * f + _P4) * f + _P3) * f + _P2) * f + _P1) * f + _P0)
    exponent = np.float32(shifted).view(np.int32) << _MANTISSA_BITS
    return np.int32(p.view(np.int32) + exponent).view(np.float32)


@_inlined
def _advance(x, v, gate):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return x + Δ·(x∞ − x)/(τ + Δ/2), with 1 + u² as common denominator, so that a single division remains."""
    offset, scale, flat, bell = gate
    u = _exp2(offset + scale * v)
    q = _ONE + u * u
    return x + (_ONE - x * q) / (flat * q + bell * u)


@_inlined
def _constants(gates, k):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return gates[k, 0], gates[k, 1], gates[k, 2], gates[k, 3]


@compiled(**_OPTIONS)
def _integrate(g, gates, initial, reversal, capacity, drive, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Integrate a block: g (16·BLOCK,) in µS, rows as in `_conductances`; `_tables`; out (BLOCK, bins, 4) in mV."""
    # Plain numbers instead of table entries inside the loop: the loop cannot overwrite them, so the compiler may
    # vectorise it. For the same reason the state is one flat array with fixed offsets.
    soma_m, soma_h, soma_n = _constants(gates, 0), _constants(gates, 1), _constants(gates, 2)
    axon_m, axon_h, axon_n, axon_p = (
        _constants(gates, 3), _constants(gates, 4), _constants(gates, 5), _constants(gates, 6)
    )  # fmt: skip
    apical_a, apical_b, apical_r = _constants(gates, 7), _constants(gates, 8), _constants(gates, 9)
    basal_a, basal_b, basal_r = _constants(gates, 10), _constants(gates, 11), _constants(gates, 12)
    e_na, e_k, e_ca, e_h, e_leak = reversal[0], reversal[1], reversal[2], reversal[3], reversal[4]
    c_soma, c_axon, c_apical, c_basal = capacity[0], capacity[1], capacity[2], capacity[3]

    x = np.empty(len(initial) * BLOCK, np.float32)
    for k in range(len(initial)):
        for i in range(BLOCK):
            x[k * BLOCK + i] = initial[k]

    num_bins = out.shape[1]
    for step in range(len(drive) + 1):
        if step % STEPS_PER_BIN == 0:
            sample = step // STEPS_PER_BIN
            for i in range(BLOCK):
                for probe in range(4):
                    out[i, sample, probe] = x[probe * BLOCK + i]
            if sample + 1 == num_bins:
                break
        current = drive[step]
        for i in range(_CELLS):
            v_soma, v_axon, v_apical, v_basal = x[V_SOMA + i], x[V_AXON + i], x[V_APICAL + i], x[V_BASAL + i]

            m = _advance(x[SOMA_M + i], v_soma, soma_m)
            h = _advance(x[SOMA_H + i], v_soma, soma_h)
            n = _advance(x[SOMA_N + i], v_soma, soma_n)
            x[SOMA_M + i], x[SOMA_H + i], x[SOMA_N + i] = m, h, n
            n2 = n * n
            na, k = g[SOMA_NA + i] * (m * m * m) * h, g[SOMA_K + i] * (n2 * n2)
            leak = g[SOMA_LEAK + i]
            soma_total = c_soma + na + k + leak
            soma_rhs = na * (e_na - v_soma) + k * (e_k - v_soma) + leak * (e_leak - v_soma) + current

            m = _advance(x[AXON_M + i], v_axon, axon_m)
            h = _advance(x[AXON_H + i], v_axon, axon_h)
            n = _advance(x[AXON_N + i], v_axon, axon_n)
            p = _advance(x[AXON_P + i], v_axon, axon_p)
            x[AXON_M + i], x[AXON_H + i], x[AXON_N + i], x[AXON_P + i] = m, h, n, p
            n2 = n * n
            na = g[AXON_NA + i] * (m * m * m) * h
            k = g[AXON_K + i] * (n2 * n2) + g[AXON_M_TYPE + i] * p
            leak, axon_coupling = g[AXON_LEAK + i], g[AXON_COUPLING + i]
            axon_weight = _ONE / (c_axon + na + k + leak + axon_coupling)
            axon_rhs = na * (e_na - v_axon) + k * (e_k - v_axon) + leak * (e_leak - v_axon)
            axon_current = axon_coupling * (v_soma - v_axon)
            axon_rhs += axon_current

            a = _advance(x[APICAL_A + i], v_apical, apical_a)
            b = _advance(x[APICAL_B + i], v_apical, apical_b)
            r = _advance(x[APICAL_R + i], v_apical, apical_r)
            x[APICAL_A + i], x[APICAL_B + i], x[APICAL_R + i] = a, b, r
            ca, ih = g[APICAL_CA + i] * (a * a) * b, g[APICAL_IH + i] * r
            leak, apical_coupling = g[APICAL_LEAK + i], g[APICAL_COUPLING + i]
            apical_weight = _ONE / (c_apical + ca + ih + leak + apical_coupling)
            apical_rhs = ca * (e_ca - v_apical) + ih * (e_h - v_apical) + leak * (e_leak - v_apical)
            apical_current = apical_coupling * (v_soma - v_apical)
            apical_rhs += apical_current

            a = _advance(x[BASAL_A + i], v_basal, basal_a)
            b = _advance(x[BASAL_B + i], v_basal, basal_b)
            r = _advance(x[BASAL_R + i], v_basal, basal_r)
            x[BASAL_A + i], x[BASAL_B + i], x[BASAL_R + i] = a, b, r
            a2 = a * a
            k, ih = g[BASAL_K + i] * (a2 * a2) * b, g[BASAL_IH + i] * r
            leak, basal_coupling = g[BASAL_LEAK + i], g[BASAL_COUPLING + i]
            basal_weight = _ONE / (c_basal + k + ih + leak + basal_coupling)
            basal_rhs = k * (e_k - v_basal) + ih * (e_h - v_basal) + leak * (e_leak - v_basal)
            basal_current = basal_coupling * (v_soma - v_basal)
            basal_rhs += basal_current

            # The change of the voltages to t+Δ/2 (smaller numbers, less rounding than the voltages themselves):
            # leaves into the soma, the soma, and back into the leaves.
            to_axon = axon_coupling * axon_weight
            to_apical = apical_coupling * apical_weight
            to_basal = basal_coupling * basal_weight
            soma_total += axon_coupling * (_ONE - to_axon)
            soma_total += apical_coupling * (_ONE - to_apical) + basal_coupling * (_ONE - to_basal)
            soma_rhs -= axon_current + apical_current + basal_current
            soma_rhs += to_axon * axon_rhs + to_apical * apical_rhs + to_basal * basal_rhs
            half = soma_rhs / soma_total
            x[V_SOMA + i] = v_soma + _TWO * half
            x[V_AXON + i] = v_axon + _TWO * (axon_rhs * axon_weight + to_axon * half)
            x[V_APICAL + i] = v_apical + _TWO * (apical_rhs * apical_weight + to_apical * half)
            x[V_BASAL + i] = v_basal + _TWO * (basal_rhs * basal_weight + to_basal * half)


def _tables() -> tuple[NDArray[np.float32], ...]:
    """Return the other inputs of `_integrate`: gates, initial state, reversal, capacity, drive."""
    step = BIN_MS / STEPS_PER_BIN
    flat = [gate for channel in CHANNELS for gate in channel.gates]
    scale = [-math.log2(math.e) / (2 * gate.slope) for gate in flat]
    gates = [
        (-s * gate.v_half, s, gate.tau_min / step + 0.5, 2 * (gate.tau_max - gate.tau_min) / step)
        for s, gate in zip(scale, flat, strict=True)
    ]
    initial = [V_HOLD] * len(PROBES) + [float(gate.steady(V_HOLD)) for gate in flat]
    # Crank–Nicolson solves for the middle of the step, hence 2C/Δ; µF/cm² · µm² = 1e-5 nF.
    capacity = [2 * CAPACITANCE[probe] * AREAS[probe] * 1e-5 / step for probe in PROBES]
    knots = stimulus()
    half_steps = (np.arange((NUM_BINS - 1) * STEPS_PER_BIN) + 0.5) / STEPS_PER_BIN
    drive = np.interp(half_steps, np.arange(NUM_BINS), knots)
    reversal = (E_NA, E_K, E_CA, E_H, E_LEAK)
    return tuple(np.asarray(table, np.float32) for table in (gates, initial, reversal, capacity, drive))


def _conductances(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (n, 16) in µS, compartment by compartment: its channels in the order of CHANNELS, then its coupling."""
    column = {parameter.name: values[:, k].astype(np.float64) for k, parameter in enumerate(PARAMETERS)}
    rows = []
    for probe in PROBES:
        for channel in CHANNELS:
            if channel.probe == probe:
                density = column[channel.density] if isinstance(channel.density, str) else channel.density
                rows.append(np.broadcast_to(density * AREAS[probe] * 1e-2, len(values)))  # S/cm² · µm² = 0.01 µS
        if probe != "soma":
            rows.append(column[f"{probe}_coupling"])
    return np.stack(rows, axis=1).astype(np.float32)


def simulate(unit: NDArray, threads: int | None = None) -> NDArray[np.float32]:
    """Return voltages (n, 1600, 4) in mV at the four probes, of cells with the given (n, 15) unit parameters.

    By default uses as many threads as this process has cores; the voltages do not depend on the number.
    """
    conductances = _conductances(physical(unit))
    num_cells = len(conductances)
    if num_cells == 0:
        return np.empty((0, NUM_BINS, len(PROBES)), np.float32)
    num_blocks = -(-num_cells // BLOCK)
    padded = np.pad(conductances, ((0, num_blocks * BLOCK - num_cells), (0, 0)), mode="edge")
    blocks = np.ascontiguousarray(padded.reshape(num_blocks, BLOCK, -1).transpose(0, 2, 1)).reshape(num_blocks, -1)
    voltages = np.empty((num_blocks, BLOCK, NUM_BINS, len(PROBES)), np.float32)
    tables = _tables()

    def run(start: int, stop: int) -> None:
        for block in range(start, stop):
            _integrate(blocks[block], *tables, voltages[block])

    on_cores(run, num_blocks, threads)
    return voltages.reshape(-1, NUM_BINS, len(PROBES))[:num_cells]
