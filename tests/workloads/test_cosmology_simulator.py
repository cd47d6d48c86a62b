"""The cosmology simulator: gravity against linear theory, gas that follows it, reproducible files that appear whole."""

import h5py
import numpy as np
import pytest
import torch

from podium.errors import UserError
from podium.workloads.cosmology import scales
from podium.workloads.cosmology.make import make as make_shown
from podium.workloads.cosmology.power import power_spectrum
from podium.workloads.cosmology.section import CosmologyMake
from podium.workloads.cosmology.simulator import baryons, simulate
from podium.workloads.cosmology.simulator import mesh as mesh_module
from podium.workloads.cosmology.simulator.gravity import displaced, evolve, initial
from podium.workloads.cosmology.simulator.linear import Cosmology
from podium.workloads.cosmology.simulator.mesh import Mesh, deposit, deposit_sheet, smooth

COSMOLOGY = Cosmology()
SEED = 5


def read(path):
    with h5py.File(path) as file:
        return file["Nbody"][:], file["Hydro"][:], dict(file.attrs)


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """32³ published cells: (path, Nbody, Hydro, attributes)."""
    path = tmp_path_factory.mktemp("cosmology") / "box.h5"
    simulate.make_box(path, 32, seed=SEED)
    return path, *read(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """32³ cells of 16 Mpc/h: at redshift 3 all of it but the smallest scales is linear."""
    path = tmp_path_factory.mktemp("cosmology") / "large.h5"
    simulate.make_box(path, 32, seed=SEED, box_mpc=512)
    return read(path)


@pytest.fixture
def few_steps(monkeypatch):
    """For what is true of a file whatever is in it."""
    monkeypatch.setattr(simulate, "NUM_STEPS", 6)


# ----------------------------------------------------------------------------------------------- linear theory


def test_growth_is_that_of_a_universe_of_matter_early_on_and_slower_today():
    assert COSMOLOGY.growth(0.02) / COSMOLOGY.growth(0.01) == pytest.approx(2, rel=1e-4)
    assert COSMOLOGY.growth(1.0) == 1
    # The fit of Carroll, Press & Turner (1992) to the same integral.
    matter, vacuum = COSMOLOGY.omega_matter, 1 - COSMOLOGY.omega_matter
    fit = 2.5 * matter / (matter ** (4 / 7) - vacuum + (1 + matter / 2) * (1 + vacuum / 70))
    assert COSMOLOGY.growth(1.0) / (COSMOLOGY.growth(1e-3) / 1e-3) == pytest.approx(fit, rel=0.01)
    step = 1e-4
    slope = np.log(COSMOLOGY.growth(0.25 * (1 + step)) / COSMOLOGY.growth(0.25 * (1 - step))) / (2 * step)
    assert COSMOLOGY.growth_rate(0.25) == pytest.approx(slope, rel=1e-5)


def test_the_linear_spectrum_has_the_variance_asked_for_and_the_slopes_of_cold_dark_matter():
    k = np.geomspace(1e-4, 1e2, 4000)
    x = 8 * k
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    variance = np.trapezoid(COSMOLOGY.power(k) * window**2 * k**3, np.log(k)) / (2 * np.pi**2)
    assert np.sqrt(variance) == pytest.approx(COSMOLOGY.sigma8, rel=1e-3)
    slope = np.gradient(np.log(COSMOLOGY.power(k)), np.log(k))
    assert slope[0] == pytest.approx(COSMOLOGY.spectral_index, abs=0.02)
    assert -2.9 < slope[-1] < -2.4
    assert 0.01 < k[COSMOLOGY.power(k).argmax()] < 0.025
    assert COSMOLOGY.power(np.zeros(1)) == 0


def test_power_spectrum_of_a_wave_is_in_its_shell_alone():
    size, box_mpc, amplitude = 16, 50.0, 0.3
    wave = amplitude * np.cos(2 * np.pi * 3 * np.arange(size) / size)
    k, power, num_modes = power_spectrum(np.broadcast_to(wave[None, :, None], (size,) * 3) + 1, box_mpc)
    assert len(k) == size // 2
    # Variance of the wave = sum over modes of P/V.
    np.testing.assert_allclose(power[2] * num_modes[2] / box_mpc**3, amplitude**2 / 2, rtol=1e-5)
    assert np.delete(power, 2).max() < 1e-9 * power[2]
    assert num_modes[0] == 18  # of length 1 and, rounded to it, √2
    np.testing.assert_allclose(k[0], 2 * np.pi / box_mpc * (6 + 12 * np.sqrt(2)) / 18)
    np.testing.assert_allclose(k[2:], 2 * np.pi / box_mpc * np.arange(3, 9), rtol=0.05)


# --------------------------------------------------------------------------------------------------- gravity


def plane_wave(axis, size=16, amplitude=0.02, a=0.02):
    """Particles of a density wave of the growing mode along one axis, and its phase on the mesh."""
    potential = Mesh(size)
    phase = 2 * np.pi * np.arange(size) / size
    along = [1, 1, 1]
    along[axis] = size
    potential.real[...] = -amplitude * np.cos(phase).reshape(along) / (2 * np.pi / size) ** 2  # ∇²φ = δ
    potential.to_modes()
    return displaced(COSMOLOGY, potential, a), phase


def amplitude_of(particles, axis):
    """Of the displacement along the axis: in one dimension proportional to the growing mode until streams cross."""
    line = particles.displacement[axis].mean(axis=tuple({0, 1, 2} - {axis}))
    return 2 * abs(np.fft.rfft(line)[1]) / len(line)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_plane_wave_grows_as_linear_theory_says_and_moves_along_its_axis_alone(axis):
    particles, phase = plane_wave(axis)
    before = amplitude_of(particles, axis)
    assert before == pytest.approx(0.02 / (2 * np.pi / 16), rel=1e-4)
    evolve(COSMOLOGY, particles, 0.08, num_steps=16)
    growth = COSMOLOGY.growth(0.08) / COSMOLOGY.growth(0.02)
    assert amplitude_of(particles, axis) / before == pytest.approx(growth, rel=0.01)
    speeds = [np.abs(component).max() for component in particles.momentum]
    assert all(speeds[other] < 1e-3 * speeds[axis] for other in {0, 1, 2} - {axis})
    # It falls towards the crest at 0: away from it on its far side.
    line = np.moveaxis(particles.momentum[axis], axis, 0)[:, 0, 0]
    assert np.corrcoef(line, -np.sin(phase))[0, 1] > 0.99


def test_finer_steps_change_little():
    coarse, fine = (plane_wave(0, size=16, amplitude=0.05)[0] for _ in range(2))
    evolve(COSMOLOGY, coarse, 0.25, num_steps=16)
    evolve(COSMOLOGY, fine, 0.25, num_steps=48)
    difference = np.abs(coarse.displacement[0] - fine.displacement[0]).max()
    assert difference < 0.01 * np.abs(fine.displacement[0]).max()


def test_total_momentum_stays_zero():
    particles = initial(COSMOLOGY, 16, simulate.CELL_MPC, seed=SEED)
    evolve(COSMOLOGY, particles, num_steps=16)
    for component in particles.momentum:
        assert abs(component.mean(dtype=np.float64)) < 1e-5 * component.std()


def test_initial_particles_have_the_linear_spectrum_in_density_and_flow():
    size, cell_mpc, a = 32, 16.0, 0.02
    particles = initial(COSMOLOGY, size, cell_mpc, seed=SEED, a=a)
    mesh = Mesh(size)
    deposit(particles.displacement, mesh)
    k, power, num_modes = power_spectrum(mesh.real, size * cell_mpc)
    shells = slice(0, 5)
    ratio = power[shells] / COSMOLOGY.power(k[shells], a)
    assert (np.abs(ratio - 1) < 4 * np.sqrt(2 / num_modes[shells]) + 0.05).all()  # four standard deviations of chance
    # Growing mode: a² dx/dt = a² H f · displacement, to first order.
    expected = a**2 * float(COSMOLOGY.expansion(a)) * COSMOLOGY.growth_rate(a) * particles.displacement[1]
    assert np.abs(particles.momentum[1] - expected).max() < 0.02 * np.abs(expected).max()


def test_deposits_keep_mass_and_momentum_wherever_particles_are():
    rng = np.random.default_rng(0)
    size = 16
    displacement = [rng.normal(0, 6, (size,) * 3).astype(np.float32) for _ in range(3)]
    values = rng.normal(1, 1, (size,) * 3).astype(np.float32)
    mesh = Mesh(size)
    for spread in (deposit, lambda d, m: deposit_sheet(d, None, m)):
        spread(displacement, mesh)
        assert mesh.real.mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)
        assert mesh.real.min() >= 0
    deposit_sheet(displacement, values, mesh)
    assert mesh.real.mean(dtype=np.float64) == pytest.approx(values.mean(dtype=np.float64), rel=1e-5)


def test_clouds_lie_where_their_particles_are():
    size = 16
    shifts = (2.25, -17.5, 0.0)  # cells: more than once around the box as well
    displacement = [np.full((size,) * 3, shift, np.float32) for shift in shifts]
    values = np.zeros((size,) * 3, np.float32)
    values[1, 2, 3] = 1
    mesh = Mesh(size)
    deposit_sheet(displacement, values, mesh)
    centre = [np.angle(np.fft.fftn(mesh.real)[tuple(np.eye(3, dtype=int)[axis])]) for axis in range(3)]
    place = [-angle * size / (2 * np.pi) % size for angle in centre]
    # Lattice sites lie halfway between mesh points; interpolated between sites, a value spreads evenly around its own.
    np.testing.assert_allclose(
        place, [(q + 0.5 + shift) % size for q, shift in zip((1, 2, 3), shifts, strict=True)], atol=1e-3
    )


# ---------------------------------------------------------------------------------------------------- fields


def test_density_follows_the_linear_spectrum_on_large_scales(large):
    nbody, _, attributes = large
    box_mpc = attributes["box_mpc_per_h"]
    k, power, num_modes = power_spectrum(scales.to_density(nbody[0]), box_mpc)
    shells = slice(0, 3)  # down to waves of 10 cells: the mesh blurs shorter ones
    chance = np.sqrt(2 / num_modes[shells])
    assert (np.abs(power[shells] / COSMOLOGY.power(k[shells], 0.25) - 1) < 3 * chance + 0.1).all()
    # Without chance: against the same waves as they began.
    mesh = Mesh(32)
    deposit(initial(COSMOLOGY, 32, box_mpc / 32, seed=SEED).displacement, mesh)
    _, began, _ = power_spectrum(mesh.real, box_mpc)
    growth = np.sqrt(power[shells] / began[shells]) / (COSMOLOGY.growth(0.25) / COSMOLOGY.growth(0.02))
    np.testing.assert_allclose(growth, 1, atol=0.05)


def test_mean_densities_are_one_and_velocities_average_to_zero(box):
    _, nbody, hydro, _ = box
    density, gas = scales.to_density(nbody[0]).astype(np.float64), scales.to_density(hydro[0]).astype(np.float64)
    assert density.mean() == pytest.approx(1, abs=2e-3)  # the floor in empty cells adds up to a thousandth
    assert gas.mean() == pytest.approx(1, abs=1e-3)
    for velocity in nbody[1:]:
        assert abs((density * velocity).mean()) < 1e-4 * np.sqrt((density * velocity**2).mean()) + 1e-7
    for velocity in hydro[2:]:
        assert abs((gas * velocity).mean()) < 1e-3 * velocity.std()


def test_fields_fit_the_tanh_of_the_model(box):
    _, nbody, hydro, _ = box
    for field in (*nbody, *hydro):
        assert np.isfinite(field).all()
        assert np.abs(field).max() < 1
        assert field.std() > 0.005


def test_matter_has_collapsed_and_left_voids(box):
    _, nbody, _, _ = box
    density = scales.to_density(nbody[0])
    assert density.max() > 20
    assert np.median(density) < 0.8


def test_gas_is_smoother_than_dark_matter_on_small_scales_and_alike_on_large_ones(box):
    _, nbody, hydro, attributes = box
    _, matter, _ = power_spectrum(scales.to_density(nbody[0]), attributes["box_mpc_per_h"])
    _, gas, _ = power_spectrum(scales.to_density(hydro[0]), attributes["box_mpc_per_h"])
    ratio = gas / matter
    assert ratio[0] > 0.9
    assert (np.diff(ratio) < 0).all()
    assert ratio[-1] < 0.3


def test_temperature_rises_with_density_and_only_shocks_lift_it_off_the_power_law(box):
    _, _, hydro, _ = box
    density, temperature = scales.to_density(hydro[0]), scales.to_temperature(hydro[1])
    law = baryons.MEAN_TEMPERATURE_K * density**baryons.ADIABATIC_SLOPE
    assert (temperature > 0.999 * law).all()
    voids = density < 0.3
    assert np.median(temperature[voids] / law[voids]) < 1.05
    dense = density > 5
    assert np.median(temperature[dense] / law[dense]) > 1.2
    assert 3e4 < temperature.max() < 1e8


def test_velocity_channels_are_along_their_axes(large):
    """Matter converges on dense regions: with axes exchanged, the divergence would not follow the density."""
    nbody, hydro, _ = large
    for velocity, density in ((nbody[1:], nbody[0]), (hydro[2:], hydro[0])):
        wide = Mesh(32)
        wide.real[...] = scales.to_density(density)
        smooth(wide, 1.0)
        divergence = sum(np.roll(velocity[i], -1, i) - np.roll(velocity[i], 1, i) for i in range(3))
        exchanged = sum(np.roll(velocity[i], -1, 2 - i) - np.roll(velocity[i], 1, 2 - i) for i in range(3))
        true, false = (np.corrcoef(field.ravel(), wide.real.ravel())[0, 1] for field in (divergence, exchanged))
        assert true < -0.8
        assert false > -0.5


def test_velocities_are_in_km_per_second(large):
    """The spectrum of the divergence: ⟨|∇·v|²⟩ = (aHf)² P of linear theory."""
    nbody, _, attributes = large
    box_mpc = attributes["box_mpc_per_h"]
    cell_mpc = box_mpc / 32
    velocity = scales.to_velocity(nbody[1:])
    divergence = sum(np.roll(velocity[i], -1, i) - np.roll(velocity[i], 1, i) for i in range(3)) / (2 * cell_mpc)
    k, power, num_modes = power_spectrum(divergence, box_mpc)
    rate = 100 * 0.25 * float(COSMOLOGY.expansion(0.25)) * COSMOLOGY.growth_rate(0.25)
    ratio = np.sqrt(power[:3] / COSMOLOGY.power(k[:3], 0.25)) / rate
    assert np.average(ratio, weights=num_modes[:3]) == pytest.approx(1, abs=0.15)


def test_smoothing_keeps_the_mean_and_never_goes_below_zero():
    mesh = Mesh(16)
    mesh.real[3, 4, 5] = 4096
    smooth(mesh, 0.7)
    assert mesh.real.mean(dtype=np.float64) == pytest.approx(1, rel=1e-5)
    assert mesh.real.min() > -1e-3
    along = mesh.real.sum(axis=(1, 2), dtype=np.float64) / 4096
    assert (along * (np.arange(16) - 3) ** 2)[:11].sum() == pytest.approx(0.7**2, rel=0.01)


def test_scales_go_back_and_forth():
    density = np.geomspace(1e-3, 1e5, 50).astype(np.float32)
    np.testing.assert_allclose(np.exp(14 * scales.from_density(density)), density, rtol=1e-5)
    np.testing.assert_allclose(scales.to_density(scales.from_density(density)), density, rtol=1e-5)
    tensor = torch.from_numpy(scales.from_density(density))
    np.testing.assert_allclose(scales.to_density(tensor).numpy(), density, rtol=1e-5)
    assert scales.from_density(np.zeros(1, np.float32)) == scales.from_density(np.full(1, 1e-3, np.float32))
    hot = np.geomspace(1e3, 1e8, 50).astype(np.float32)
    np.testing.assert_allclose(1e4 * np.exp(14 * scales.from_temperature(hot)), hot, rtol=1e-5)
    np.testing.assert_allclose(scales.to_temperature(torch.from_numpy(scales.from_temperature(hot))), hot, rtol=1e-5)
    assert scales.to_velocity(scales.from_velocity(np.float32(250))) == pytest.approx(250)


# ------------------------------------------------------------------------------------------------------ files


def test_file_has_the_published_layout_and_says_how_it_was_made(box):
    path, nbody, hydro, attributes = box
    assert (nbody.shape, nbody.dtype) == ((4, 32, 32, 32), np.float32)
    assert (hydro.shape, hydro.dtype) == ((5, 32, 32, 32), np.float32)
    with h5py.File(path) as file:
        assert set(file) == {"Nbody", "Hydro"}
        assert file["Nbody"].chunks is None
        assert file["Hydro"].chunks is None
    assert (attributes["size"], attributes["seed"], attributes["redshift"]) == (32, SEED, 3)
    assert attributes["box_mpc_per_h"] == pytest.approx(32 * 100 / 1024)
    assert attributes["omega_matter"] == COSMOLOGY.omega_matter
    assert attributes["velocity_scale_km_s"] == scales.VELOCITY_SCALE_KM_S


def test_same_seed_gives_the_same_file_whatever_the_number_of_threads(few_steps, tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_module, "BLOCK_CELLS", 1024)  # several blocks for each thread, as large boxes have
    for count in (1, 2, 3):
        simulate.make_box(tmp_path / f"{count}.h5", 16, seed=SEED, threads=count)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_another_seed_gives_another_box(few_steps, tmp_path):
    boxes = []
    for seed in (1, 2):
        simulate.make_box(tmp_path / f"{seed}.h5", 16, seed=seed)
        boxes.append(read(tmp_path / f"{seed}.h5")[0])
    assert abs(np.corrcoef(boxes[0][0].ravel(), boxes[1][0].ravel())[0, 1]) < 0.3


def test_data_set_has_three_boxes_of_their_own_seeds_and_the_same_cells(few_steps, tmp_path, capsys):
    make_shown(CosmologyMake(size=24, out=tmp_path / "new", valid_size=16, box_mpc=6.0))
    splits = {path.stem: read(path) for path in sorted((tmp_path / "new").iterdir())}
    assert set(splits) == {"train", "valid", "test"}
    sizes = {split: attributes["size"] for split, (_, _, attributes) in splits.items()}
    assert sizes == {"train": 24, "valid": 16, "test": 16}
    assert len({int(attributes["seed"]) for _, _, attributes in splits.values()}) == 3
    assert all(x["box_mpc_per_h"] / x["size"] == pytest.approx(0.25) for _, _, x in splits.values())
    assert "24³ cells" in capsys.readouterr().err


def test_an_interruption_leaves_nothing_behind_and_the_old_files_alone(few_steps, tmp_path):
    before = simulate.make_dataset(tmp_path, 16, seed=1, valid_size=16)
    content = [path.read_bytes() for path in before.paths]
    seen = []

    def stop(done):
        seen.append(done)
        if done > 0.95:  # two boxes are whole by then, and the third is being written
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate.make_dataset(tmp_path, 16, seed=2, valid_size=16, progress=stop)
    assert seen == sorted(seen)
    assert set(tmp_path.iterdir()) == set(before.paths)
    assert [path.read_bytes() for path in before.paths] == content


def test_a_box_too_large_for_memory_is_refused_with_its_need(tmp_path, monkeypatch):
    class Memory:
        available = 2 * 10**9

    monkeypatch.setattr(simulate.psutil, "virtual_memory", Memory)
    need = simulate.needed_bytes(1024) / 1e9
    with pytest.raises(UserError, match=rf"1024³ cells needs {need:.1f} GB of memory .* 2\.0 GB are available"):
        simulate.make_box(tmp_path / "new" / "box.h5", 1024, seed=1)
    assert not list(tmp_path.iterdir())


def test_the_need_of_a_large_box_is_said_beforehand(tmp_path, monkeypatch, capsys):
    class Memory:
        available = 0

    monkeypatch.setattr(simulate.psutil, "virtual_memory", Memory)
    with pytest.raises(UserError):
        make_shown(CosmologyMake(size=512, out=tmp_path))
    assert f"{simulate.needed_bytes(512) / 1e9:.1f} GB of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 8},
        {"size": 17},
        {"size": 16, "seed": -1},
        {"size": 16, "box_mpc": 0.0},
        {"size": 16, "box_mpc": np.nan},
    ],
    ids=str,
)
def test_senseless_boxes_are_refused_and_nothing_is_written(tmp_path, arguments):
    with pytest.raises(UserError):
        simulate.make_box(tmp_path / "box.h5", **{"seed": 1, **arguments})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        simulate.make_box(tmp_path / "file" / "below" / "box.h5", 16, seed=1)
