"""The simulated cell against the NEURON simulator: same compartments, channels and current, an independent integrator.

NEURON gets the cell from the same tables (`workloads/neuron/simulator/cell.py`), its gates as density channels made at
run time (`KSChan`, no compiled mechanisms), and integrates with variable steps at tight tolerance.
"""

import math

import numpy as np
import pytest

from podium.workloads.neuron.simulator import cell
from podium.workloads.neuron.simulator.simulate import simulate

neuron = pytest.importorskip("neuron", reason="the package `neuron` (test extra) is not installed")
h = neuron.h

SPIKE_MV = -10.0
NUM_CELLS = 12


@pytest.fixture(scope="module")
def mechanisms():
    """Name of the NEURON mechanism of each gated channel of the cell."""
    grid = np.linspace(-200.0, 150.0, 35_001)  # 0.01 mV: the table's interpolation error is far below the tolerances
    names = {}
    for number, channel in enumerate(cell.CHANNELS):
        if not channel.gates:
            continue
        kschan = h.KSChan()
        names[channel] = f"podium{number}"
        kschan.name(names[channel])
        kschan.ion("NonSpecific")
        kschan.iv_type(0)
        for k, gate in enumerate(channel.gates):
            kschan.add_hhstate(f"x{k}")
            kschan.gate(k).power(gate.power)
            transition = kschan.trans(k)
            transition.type(1)  # by steady state and time constant
            transition.set_f(0, 7, h.Vector(gate.steady(grid)), grid[0], grid[-1])  # 7: a table
            transition.set_f(1, 7, h.Vector(gate.tau(grid)), grid[0], grid[-1])
    return names


def neuron_voltages(values, mechanisms):
    """(1600, 4) voltages by NEURON of the cell with the given physical parameters."""
    parameters = dict(zip((p.name for p in cell.PARAMETERS), values, strict=True))
    sections = {}
    for probe in cell.PROBES:
        section = sections[probe] = h.Section(name=probe)
        section.nseg = 1
        section.L = section.diam = math.sqrt(cell.AREAS[probe] / math.pi)
        section.cm = cell.CAPACITANCE[probe]
        if probe != "soma":
            # Joined to the middle of the soma, so that half the section's own axial resistance is all there is.
            section.connect(sections["soma"](0.5), 0)
            mega_ohm = 1 / parameters[f"{probe}_coupling"]
            section.Ra = 100 * mega_ohm * math.pi * (section.diam / 2) ** 2 / (section.L / 2)
    for channel in cell.CHANNELS:
        section = sections[channel.probe]
        density = parameters[channel.density] if isinstance(channel.density, str) else channel.density
        name = mechanisms.get(channel, "pas")
        section.insert(name)
        mechanism = getattr(section(0.5), name)
        mechanism.e = channel.reversal
        setattr(mechanism, "gmax" if channel.gates else "g", density)

    times = h.Vector(np.arange(cell.NUM_BINS) * cell.BIN_MS)
    clamp = h.IClamp(sections["soma"](0.5))
    clamp.dur = 1e9
    current = h.Vector(cell.stimulus())
    current.play(clamp._ref_amp, times, True)
    traces = [h.Vector().record(sections[probe](0.5)._ref_v, times) for probe in cell.PROBES]
    solver = h.CVode()
    solver.active(True)
    solver.atol(1e-8)
    solver.rtol(1e-8)
    h.finitialize(cell.V_HOLD)
    solver.solve(cell.NUM_BINS * cell.BIN_MS)
    solver.active(False)
    return np.stack([trace.as_numpy().copy() for trace in traces], axis=1)


def spike_times(soma):
    """Upward crossings of SPIKE_MV in ms, by linear interpolation."""
    k = np.flatnonzero((soma[:-1] < SPIKE_MV) & (soma[1:] >= SPIKE_MV))
    return (k + (SPIKE_MV - soma[k]) / (soma[k + 1] - soma[k])) * cell.BIN_MS


@pytest.fixture(scope="module")
def both(mechanisms):
    """(cells, 1600, 4) voltages of the same cells by Podium and by NEURON."""
    unit = cell.unit_parameters(1, "against neuron", np.arange(NUM_CELLS))
    unit[0] = 0  # the middle of every range
    theirs = [neuron_voltages(values, mechanisms) for values in cell.physical(unit).astype(np.float64)]
    return simulate(unit), np.stack(theirs)


def test_cells_have_the_same_spikes_at_the_same_times(both):
    ours, theirs = ([spike_times(frame[:, 0]) for frame in voltages] for voltages in both)
    assert [len(times) for times in ours] == [len(times) for times in theirs]
    assert sum(len(times) > 0 for times in theirs) >= 8, "too few of the compared cells spike"
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=0.1)


def test_voltages_agree_at_every_probe(both):
    ours, theirs = both
    rms = np.sqrt(np.mean((ours - theirs) ** 2, axis=1))  # (cells, probes)
    assert (rms < 1.0).all(), rms
    assert (np.median(rms, axis=0) < 0.1).all(), rms
