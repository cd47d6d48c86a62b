"""The interface of the cosmology simulator: from a seed to boxes in the published layout.

`gravity.py` moves the dark matter, `baryons.py` makes the gas; this file owns the boxes: their size, seeds, units and
memory, and writing them plane by plane. A file holds

    Nbody (4, N, N, N) float32    density, velocity x, y, z of the dark matter
    Hydro (5, N, N, N) float32    density, temperature, velocity x, y, z of the gas

scaled as in `workloads/cosmology/scales.py`; its attributes record how it was made.
"""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
import psutil

from podium.contract import Split
from podium.errors import UserError, system_reason
from podium.machine.atomic_files import write_files
from podium.machine.cores import own_cores
from podium.machine.counter_rng import key
from podium.workloads.cosmology import scales
from podium.workloads.cosmology.simulator import baryons
from podium.workloads.cosmology.simulator.gravity import NUM_STEPS, START, STOP, Particles, evolve, initial
from podium.workloads.cosmology.simulator.linear import Cosmology
from podium.workloads.cosmology.simulator.mesh import Array, Mesh, deposit_sheet

#: Changed whenever boxes of the same seed change.
VERSION = 1
#: The published boxes: 1,024 cells on 100 Mpc/h.
CELL_MPC = 100 / 1024
MIN_SIZE = 16
COSMOLOGY = Cosmology()

Progress = Callable[[float], None]

_FIELDS = len(scales.NBODY_CHANNELS) + len(scales.HYDRO_CHANNELS)
#: Meshes and components of float32 in memory at the peak, while the first velocity is deposited: displacement (3),
#: momentum (3), density of dark matter and of gas, the velocity, its divergence.
_ARRAYS = 10
#: Planes of complex double precision that a thread holds while it works on one.
_PLANES = 6
#: Smaller boxes are made by one thread: distributing their planes would take longer than computing them.
_SMALL = 64
_GRAVITY_SHARE = 0.85  # of the time; the rest is fields and files


@dataclass(frozen=True)
class Made:
    """What was written, and how fast."""

    paths: tuple[Path, ...]
    num_cells: int
    seconds: float

    @property
    def cells_per_second(self) -> float:
        return self.num_cells / self.seconds


def needed_bytes(size: int) -> int:
    """Return the memory that making a box of `size`³ cells takes, in addition to what the process already uses."""
    return _ARRAYS * 4 * size * size * (size + 2) + len(own_cores()) * _PLANES * 16 * size * size + 2**26


def file_bytes(size: int) -> int:
    """Return the size of a box's file."""
    return _FIELDS * 4 * size**3 + 2**13


def box_seed(seed: int, split: Split) -> int:
    """Return the seed of the box of a split; the boxes of a data set are independent."""
    return key("cosmology box", seed, split) >> 1  # as HDF5 attributes and recipes hold it: 63 bits


def make_box(
    path: Path,
    size: int,
    *,
    seed: int,
    box_mpc: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Made:
    """Simulate a box of `size`³ cells into the HDF5 file `path`, which appears complete or not at all.

    `box_mpc` is its side in comoving Mpc/h (None: with cells of the published size). Runs on all cores by default; the
    file does not depend on their number. `progress` is called with the share that is done.
    """
    return _make({path: (size, seed)}, box_mpc, threads, progress)


def make_dataset(
    folder: Path,
    size: int,
    *,
    seed: int = 1,
    valid_size: int | None = None,
    box_mpc: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Made:
    """Simulate `train.h5` of `size`³ cells, and `valid.h5` and `test.h5` of half the side or of `valid_size`.

    All have cells of the same size: `box_mpc` is the side of the training box. They appear together or not at all.
    """
    other = max(32, size // 2 // 2 * 2) if valid_size is None else valid_size
    sizes: dict[Split, int] = {"train": size, "valid": other, "test": other}
    boxes = {folder / f"{split}.h5": (sizes[split], box_seed(seed, split)) for split in sizes}
    return _make(boxes, box_mpc, threads, progress)


def check_size(size: int) -> None:
    """Raise UserError for sizes that cannot be simulated, or not in this machine's memory."""
    if size < MIN_SIZE or size % 2:
        raise UserError(f"a box needs an even number of cells a side, at least {MIN_SIZE}, but {size} were asked for")
    needed, available = needed_bytes(size), psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"a box of {size}³ cells needs {needed / 1e9:,.1f} GB of memory while it is made, but "
            f"{available / 1e9:,.1f} GB are available: make a smaller one, or use a machine with more"
        )


def _make(
    boxes: dict[Path, tuple[int, int]], box_mpc: float | None, threads: int | None, progress: Progress | None
) -> Made:
    for size, seed in boxes.values():
        check_size(size)
        if seed < 0:
            raise UserError(f"the seed of a box must not be negative, but is {seed}")
    if box_mpc is not None and not (math.isfinite(box_mpc) and box_mpc > 0):
        raise UserError(f"the side of a box must be a positive number of Mpc/h, but is {box_mpc}")
    first_size = next(iter(boxes.values()))[0]
    cell_mpc = CELL_MPC if box_mpc is None else box_mpc / first_size
    folder = next(iter(boxes)).parent
    total = sum(size**3 for size, _ in boxes.values())
    began = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, sum(file_bytes(size) for size, _ in boxes.values()))
        with write_files(*boxes) as aside:
            done = 0
            for path, (size, seed) in zip(aside, boxes.values(), strict=True):
                _write_box(path, size, seed, cell_mpc, threads, _part(progress, done / total, size**3 / total))
                done += size**3
    except OSError as error:
        raise UserError(f"boxes cannot be written to {folder}: {system_reason(error)}") from error
    return Made(tuple(boxes), total, time.perf_counter() - began)


def _part(progress: Progress | None, start: float, share: float) -> Progress:
    return lambda done: progress(start + share * done) if progress is not None else None


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder} has {free / 1e9:,.1f} GB free, but the boxes need {needed / 1e9:,.1f} GB")


def _write_box(path: Path, size: int, seed: int, cell_mpc: float, threads: int | None, progress: Progress) -> None:
    if threads is None:
        threads = len(own_cores()) if size >= _SMALL else 1
    particles = initial(COSMOLOGY, size, cell_mpc, seed=seed, threads=threads)
    gravity_progress = _part(progress, 0, _GRAVITY_SHARE)
    evolve(COSMOLOGY, particles, num_steps=NUM_STEPS, threads=threads, progress=gravity_progress)
    with h5py.File(path, "w") as file:
        shape = (size, size, size)
        file.create_dataset("Nbody", (len(scales.NBODY_CHANNELS), *shape), np.float32)
        file.create_dataset("Hydro", (len(scales.HYDRO_CHANNELS), *shape), np.float32)
        file.attrs.update(_attributes(size, seed, cell_mpc))
        _write_fields(file, particles, cell_mpc, threads, _part(progress, _GRAVITY_SHARE, 1 - _GRAVITY_SHARE))


def _write_fields(
    file: h5py.File, particles: Particles, cell_mpc: float, threads: int | None, progress: Progress
) -> None:
    """Write field by field and free particles as soon as they are no longer needed, to limit the memory used."""
    size, a = len(particles.displacement[0]), particles.a
    gas = baryons.gas(COSMOLOGY, a, cell_mpc)
    nbody, hydro = file["Nbody"], file["Hydro"]

    mesh = Mesh(size, threads)
    deposit_sheet(particles.displacement, None, mesh)
    matter = mesh.real.copy()
    _write(nbody, 0, lambda x: scales.from_density(matter[x]))
    baryons.density(matter, gas, mesh)
    gas_density = mesh.real.copy()
    _write(hydro, 0, lambda x: scales.from_density(gas_density[x]))
    progress(0.3)

    divergence = np.zeros((size, size, size), np.float32)
    to_km_s = np.float32(100 * cell_mpc / a)
    for axis in range(3):
        deposit_sheet(particles.displacement, particles.momentum[axis], mesh)
        particles.momentum[axis] = np.empty(0, np.float32)
        if axis == 2:
            particles.displacement.clear()
        mesh.real[...] *= to_km_s
        # Where there are no particles, dark matter moves with the gas: replaced below, once that is known.
        _write(nbody, 1 + axis, lambda x: _velocity(mesh.real[x], matter[x]))
        baryons.smooth(mesh, gas.pressure_cells)
        mesh.real[...] /= gas_density
        _write(hydro, 2 + axis, lambda x: scales.from_velocity(mesh.real[x]))
        _fill_empty(nbody, 1 + axis, matter, mesh.real)
        baryons.add_divergence(mesh.real, axis, gas, divergence, threads)
        progress(0.3 + 0.2 * (axis + 1))

    heat = baryons.temperature(gas_density, divergence, gas, mesh, Mesh(size, threads))
    _write(hydro, 1, lambda x: scales.from_temperature(heat[x]))
    progress(1.0)


def _velocity(momentum: Array, density: Array) -> Array:
    return scales.from_velocity(np.divide(momentum, density, out=np.zeros_like(momentum), where=density > 0))


def _fill_empty(dataset: h5py.Dataset, channel: int, density: Array, velocity: Array) -> None:
    for x in range(len(density)):
        empty = density[x] <= 0
        if empty.any():
            plane = dataset[channel, x]
            plane[empty] = scales.from_velocity(velocity[x][empty])
            dataset[channel, x] = plane


def _write(dataset: h5py.Dataset, channel: int, plane: Callable[[int], Array]) -> None:
    for x in range(dataset.shape[1]):
        dataset[channel, x] = plane(x)


def _attributes(size: int, seed: int, cell_mpc: float) -> dict[str, object]:
    """Return how the box was made, and what its numbers mean."""
    return {
        "size": size,
        "seed": seed,
        "simulator": "podium",
        "version": VERSION,
        "box_mpc_per_h": size * cell_mpc,
        "redshift": round(1 / STOP - 1, 6),
        "initial_redshift": round(1 / START - 1, 6),
        "num_steps": NUM_STEPS,
        **asdict(COSMOLOGY),
        "nbody_channels": list(scales.NBODY_CHANNELS),
        "hydro_channels": list(scales.HYDRO_CHANNELS),
        "density_log": scales.DENSITY_LOG,
        "density_floor": scales.DENSITY_FLOOR,
        "temperature_log": scales.TEMPERATURE_LOG,
        "temperature_unit_k": scales.TEMPERATURE_UNIT_K,
        "velocity_scale_km_s": scales.VELOCITY_SCALE_KM_S,
    }
