"""The neuron simulator: reproducible to the bit, a cell that behaves, parameters that can be told apart, its files."""

import itertools

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from podium.errors import UserError
from podium.workloads.neuron.simulator import simulate as simulator
from podium.workloads.neuron.simulator.simulate import (
    BIN_MS,
    NUM_BINS,
    PARAMETERS,
    PROBES,
    make_dataset,
    physical,
    scaled,
    simulate,
    stimulus,
    unit_parameters,
)

NUM_CELLS = 300  # not a multiple of the integrator's blocks


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def cells():
    unit = unit_parameters(1, "train", np.arange(NUM_CELLS))
    return unit, simulate(unit)


# ------------------------------------------------------------------------------------------------- parameters


def test_there_are_fifteen_parameters_with_names_of_their_own():
    assert len({parameter.name for parameter in PARAMETERS}) == len(PARAMETERS) == 15
    assert all(parameter.name.split("_")[0] in PROBES for parameter in PARAMETERS)


def test_unit_parameters_map_onto_the_physical_ranges():
    low, middle, high = physical(np.repeat([[-1.0], [0.0], [1.0]], 15, axis=1))
    for k, parameter in enumerate(PARAMETERS):
        centre = np.sqrt(parameter.low * parameter.high) if parameter.log else (parameter.low + parameter.high) / 2
        np.testing.assert_allclose([low[k], middle[k], high[k]], [parameter.low, centre, parameter.high], rtol=1e-6)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(0, 2**31))
def test_parameters_of_a_sample_do_not_depend_on_the_others(samples, seed):
    together = unit_parameters(seed, "train", np.array(samples))
    assert (np.abs(together) <= 1).all()
    for row, sample in zip(together, samples, strict=True):
        assert same_bits(row[None], unit_parameters(seed, "train", np.array([sample])))


def test_parameters_are_uniform_and_differ_by_seed_and_domain():
    samples = np.arange(20_000)
    unit = unit_parameters(1, "train", samples)
    assert unit.dtype == np.float32
    np.testing.assert_allclose(unit.mean(axis=0), 0, atol=0.02)
    np.testing.assert_allclose(unit.var(axis=0), 1 / 3, atol=0.01)
    others = [unit_parameters(1, "val", samples), unit_parameters(2, "train", samples)]
    assert all(abs(np.corrcoef(unit[:, 0], other[:, 0])[0, 1]) < 0.03 for other in others)


@pytest.mark.parametrize(
    "unit", [np.zeros(15), np.zeros((2, 14)), np.full((1, 15), 1.01), np.full((1, 15), np.nan)], ids=str
)
def test_senseless_unit_parameters_are_refused(unit):
    with pytest.raises(UserError):
        simulate(unit)


def test_negative_sample_numbers_are_refused():
    with pytest.raises(UserError):
        unit_parameters(1, "train", np.array([-1]))


# ------------------------------------------------------------------------------------------------- exactness


@given(st.lists(st.integers(0, NUM_CELLS - 1), min_size=1, max_size=70))
@settings(max_examples=15, deadline=None)
def test_a_cell_has_the_same_voltages_in_any_company(cells, chosen):
    unit, voltages = cells
    assert same_bits(simulate(unit[chosen]), voltages[chosen])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(cells, threads):
    unit, voltages = cells
    assert same_bits(simulate(unit, threads), voltages)


def test_no_cells_are_fine():
    assert simulate(np.empty((0, 15))).shape == (0, NUM_BINS, len(PROBES))


# ------------------------------------------------------------------------------------------------- physiology


def test_the_stimulus_probes_both_directions_and_starts_quietly():
    current = stimulus()
    assert current.shape == (NUM_BINS,)
    assert not current[: round(8 / BIN_MS)].any()
    assert current.min() < -0.2
    assert current.max() > 1
    np.testing.assert_array_equal(current, stimulus())


def test_cells_behave_like_neurons():
    voltages = simulate(unit_parameters(3, "behaviour", np.arange(1000)))
    at_rest = voltages[:, round(8 / BIN_MS), 0]  # just before the current begins
    assert np.mean((at_rest > -76) & (at_rest < -58)) > 0.98
    soma = voltages[:, :, 0]
    spikes = np.sum((soma[:, :-1] < -10) & (soma[:, 1:] >= -10), axis=1)
    assert np.mean(spikes > 0) > 0.95
    assert 3 <= np.median(spikes) <= 10
    assert np.quantile(spikes, 0.95) <= 22


def test_no_corner_of_the_parameter_cube_runs_away():
    every_eighth = itertools.islice(itertools.product((-1.0, 1.0), repeat=15), 0, None, 8)
    signs = np.array(list(every_eighth))
    signs[:, -3:] = np.random.default_rng(0).choice([-1.0, 1.0], (len(signs), 3))  # the stride fixed these
    for part in np.array_split(signs, 4):
        voltages = simulate(part)
        assert np.isfinite(voltages).all()
        assert voltages.min() > -140
        assert voltages.max() < 80


def test_every_parameter_has_an_effect_of_its_own():
    """The inverse problem has an answer: no parameter hides, and none acts like a mixture of the others."""
    num_cells, step = 48, 0.1
    base = 0.8 * unit_parameters(4, "effects", np.arange(num_cells))
    reference = simulate(base)
    effects = np.empty((num_cells, 15, NUM_BINS * len(PROBES)))
    for k in range(15):
        moved = base.copy()
        moved[:, k] += step
        effects[:, k] = ((simulate(moved) - reference) / step).reshape(num_cells, -1)
    size = np.sqrt(np.mean(effects**2, axis=2))  # mV per unit
    names = [parameter.name for parameter in PARAMETERS]
    assert (np.quantile(size, 0.1, axis=0) > 0.3).all(), dict(zip(names, np.quantile(size, 0.1, axis=0), strict=True))
    # What is left of a unit effect after the best mixture of the other fourteen: 1/√(G⁻¹)ₖₖ of its Gram matrix G.
    effects /= np.linalg.norm(effects, axis=2, keepdims=True)
    own = 1 / np.sqrt(np.diagonal(np.linalg.inv(effects @ effects.transpose(0, 2, 1)), axis1=1, axis2=2))
    assert (np.median(own, axis=0) > 0.1).all(), dict(zip(names, np.median(own, axis=0), strict=True))


# ------------------------------------------------------------------------------------------------- data set


def test_data_set_has_the_published_layout(tmp_path):
    calls = []
    info = make_dataset(tmp_path, 40, seed=5, progress=lambda done, total: calls.append((done, total)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "meta.cellSpike_excite_4prB8kHz.yaml",
        "simulated_excite.cellSpike_4prB8kHz.data.h5",
    ]
    assert (info.cells, calls[-1]) == (48, (48, 48))
    assert info.cells_per_second == pytest.approx(info.cells / info.seconds)
    meta = YAML(typ="safe", pure=True).load(info.meta)["dataInfo"]
    assert info.data.name == meta["h5nameTemplate"].replace("*", "simulated")
    assert (meta["numFeature"], meta["numPar"]) == (4, 15)
    assert meta["parName"] == [parameter.published_name for parameter in PARAMETERS]
    assert [entry["name"] for entry in meta["physRange"]] == meta["parName"]
    assert meta["totalGoodFrames"] == {"train": 40, "val": 4, "test": 4}
    with h5py.File(info.data) as file:
        assert len(file) == 9
        for domain, count in meta["totalGoodFrames"].items():
            frames, unit, phys = (file[f"{domain}_{name}"] for name in ("frames", "unitStar_par", "phys_par"))
            assert (frames.shape, frames.dtype, frames.chunks) == ((count, 1600, 4), np.float16, None)
            assert (unit.shape, unit.dtype, phys.shape, phys.dtype) == (
                (count, 15),
                np.float32,
                (count, 15),
                np.float32,
            )
            expected = unit_parameters(5, domain, np.arange(count))
            assert same_bits(unit[:], expected)
            assert same_bits(phys[:], physical(expected))
            assert same_bits(frames[:], scaled(simulate(expected)).astype(np.float16))


def test_float16_frames_keep_the_voltage(cells):
    _, voltages = cells
    scale = simulator.VOLTS_UNIT
    stored = scaled(voltages).astype(np.float16).astype(np.float32)
    assert np.abs(stored * scale + simulator.VOLTS_OFFSET - voltages).max() < 0.05
    assert abs(stored.mean()) < 0.5
    assert 0.4 < stored.std() < 1.5


def test_a_larger_data_set_begins_with_the_smaller_one(tmp_path, monkeypatch):
    small = make_dataset(tmp_path / "small", 10, cell="a", dtype="float32", valid=3, test=1)
    monkeypatch.setattr(simulator, "CHUNK", 7)
    large = make_dataset(tmp_path / "large", 40, cell="b", dtype="float32", valid=5, test=2)
    with h5py.File(small.data) as one, h5py.File(large.data) as other:
        for name, array in one.items():
            assert same_bits(array[:], other[name][: len(array)])


def test_a_failure_leaves_nothing_behind_and_the_old_files_alone(tmp_path):
    before = make_dataset(tmp_path, 10)
    content = before.data.read_bytes(), before.meta.read_bytes()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path, 20, progress=stop)
    assert set(tmp_path.iterdir()) == {before.data, before.meta}
    assert (before.data.read_bytes(), before.meta.read_bytes()) == content


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples": 0},
        {"samples": -3},
        {"samples": 10, "valid": 0},
        {"samples": 10, "test": -1},
        {"samples": 10, "dtype": "int8"},
        {"samples": 10, "cell": ""},
        {"samples": 10, "cell": "a/b"},
        {"samples": 10**12},  # more than any disk holds
    ],
    ids=str,
)
def test_senseless_data_sets_are_refused_and_nothing_is_written(tmp_path, arguments):
    with pytest.raises(UserError):
        make_dataset(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        make_dataset(tmp_path / "file" / "below", 1)
