"""The interface of the neuron simulator: from parameters to voltages, or to a whole data set.

The cell is described in `cell.py` and integrated in `integrate.py`; this file owns the data set: the layout of the
published files, how voltages are scaled in them, and writing them piece by piece.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import h5py
import numpy as np
from numpy.typing import NDArray
from ruamel.yaml import YAML

from podium.errors import UserError
from podium.machine.atomic_files import write_files
from podium.machine.numba_loops import on_cores
from podium.workloads.neuron.simulator.cell import (
    BIN_MS,
    NUM_BINS,
    NUM_PARAMETERS,
    PARAMETERS,
    PROBES,
    STIMULUS_UNIT,
    VERSION,
    Parameter,
    physical,
    stimulus,
    unit_parameters,
)
from podium.workloads.neuron.simulator.integrate import simulate

__all__ = [
    "BIN_MS",
    "NUM_BINS",
    "NUM_PARAMETERS",
    "PARAMETERS",
    "PROBES",
    "STIMULUS_UNIT",
    "VERSION",
    "VOLTS_OFFSET",
    "VOLTS_UNIT",
    "DatasetInfo",
    "Parameter",
    "make_dataset",
    "physical",
    "scaled",
    "simulate",
    "stimulus",
    "unit_parameters",
]

DataType = Literal["float16", "float32"]

#: Frames hold (voltage − VOLTS_OFFSET)/VOLTS_UNIT with both in mV: mean near 0, standard deviation near 1, between −3
#: and 6. float16 then resolves 0.01 mV near rest and 0.08 mV at the top of a spike.
VOLTS_OFFSET = -60.0
VOLTS_UNIT = 20.0

#: names of the stimulus, and of probes and sampling, in the published files
_STIMULUS_NAME, _FORM = "excite", "4prB8kHz"
CHUNK = 2048  # cells written at once
_PART = 128  # cells that one thread simulates and converts at once


@dataclass(frozen=True)
class DatasetInfo:
    """What `make_dataset` wrote, and how fast."""

    meta: Path
    data: Path
    cells: int
    seconds: float

    @property
    def cells_per_second(self) -> float:
        return self.cells / self.seconds


def scaled(voltages: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale voltages in mV as in the frames of a data set (before rounding to its type)."""
    return (voltages - np.float32(VOLTS_OFFSET)) / np.float32(VOLTS_UNIT)


def make_dataset(
    folder: Path,
    samples: int,
    *,
    seed: int = 1,
    cell: str = "simulated",
    dtype: DataType = "float16",
    valid: int | None = None,
    test: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetInfo:
    """Simulate cells into `folder` in the published layout: `samples` for training, a tenth each for the others.

    Both files appear complete or not at all. `progress(done, total)` is called as cells are written.
    """
    counts = {
        "train": samples,
        "val": max(1, samples // 10) if valid is None else valid,
        "test": max(1, samples // 10) if test is None else test,
    }
    for domain, count in counts.items():
        if count < 1:
            raise UserError(f"a data set needs at least one cell in each domain, but {count} were asked for {domain}")
    if dtype not in get_args(DataType):
        raise UserError(f"frames are stored as {' or '.join(get_args(DataType))}, not as {dtype}")
    if not cell or any(character in "*?[]/\\" for character in cell):
        raise UserError(f"the cell name `{cell}` cannot be part of a file name")

    data = folder / f"{cell}_{_STIMULUS_NAME}.cellSpike_{_FORM}.data.h5"
    meta = folder / f"meta.cellSpike_{_STIMULUS_NAME}_{_FORM}.yaml"
    total = sum(counts.values())
    simulate(unit_parameters(seed, "train", np.arange(1)))  # compiles on first use, which is not part of the rate
    began = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, total, dtype)
        with write_files(data, meta) as (data_aside, meta_aside):
            _write_frames(data_aside, counts, seed, dtype, progress)
            with meta_aside.open("w", encoding="utf-8") as stream:
                yaml = YAML(typ="safe", pure=True)
                yaml.default_flow_style = None
                yaml.dump({"dataInfo": _data_info(counts, seed, dtype)}, stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"the simulated cells cannot be written to {folder}: {reason}") from error
    return DatasetInfo(meta, data, total, time.perf_counter() - began)


def _check_space(folder: Path, num_cells: int, dtype: DataType) -> None:
    needed = num_cells * (NUM_BINS * len(PROBES) * np.dtype(dtype).itemsize + 2 * NUM_PARAMETERS * 4)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder} has {free / 1e9:.1f} GB free, but the simulated cells need {needed / 1e9:.1f} GB")


def _frames(unit: NDArray[np.float32], dtype: DataType) -> NDArray:
    """Return frames as stored, converted part by part on all cores; HDF5 would use one core, and be slower."""
    frames = np.empty((len(unit), NUM_BINS, len(PROBES)), dtype)

    def run(first: int, last: int) -> None:
        for start in range(first * _PART, last * _PART, _PART):
            part = slice(start, start + _PART)
            frames[part] = scaled(simulate(unit[part], threads=1))

    on_cores(run, -(-len(unit) // _PART))
    return frames


def _write_frames(
    path: Path,
    counts: dict[str, int],
    seed: int,
    dtype: DataType,
    progress: Callable[[int, int], None] | None,
) -> None:
    done, total = 0, sum(counts.values())
    with h5py.File(path, "w") as file:
        for domain, count in counts.items():
            frames = file.create_dataset(f"{domain}_frames", (count, NUM_BINS, len(PROBES)), dtype)
            unit_star = file.create_dataset(f"{domain}_unitStar_par", (count, NUM_PARAMETERS), "float32")
            phys = file.create_dataset(f"{domain}_phys_par", (count, NUM_PARAMETERS), "float32")
            for start in range(0, count, CHUNK):
                rows = slice(start, min(start + CHUNK, count))
                unit = unit_parameters(seed, domain, np.arange(rows.start, rows.stop))
                frames[rows] = _frames(unit, dtype)
                unit_star[rows] = unit
                phys[rows] = physical(unit)
                done += len(unit)
                if progress is not None:
                    progress(done, total)


def _data_info(counts: dict[str, int], seed: int, dtype: DataType) -> dict[str, Any]:
    """Return the content of the meta file: the published keys, and how the cells were made."""
    return {
        "h5nameTemplate": f"*_{_STIMULUS_NAME}.cellSpike_{_FORM}.data.h5",
        "numFeature": len(PROBES),
        "numTimeBins": NUM_BINS,
        "numPar": NUM_PARAMETERS,
        "parName": [parameter.published_name for parameter in PARAMETERS],
        "probeName": list(PROBES),
        "featureName": list(PROBES),  # the same under the name that the published plots look for
        "totalGoodFrames": dict(counts),
        "physRange": [
            {
                "name": parameter.published_name,
                "low": parameter.low,
                "high": parameter.high,
                "scale": "log" if parameter.log else "linear",
                "unit": parameter.unit,
            }
            for parameter in PARAMETERS
        ],
        "samplingHz": round(1000 / BIN_MS),
        "frameType": dtype,
        "voltsScale": {"offset": VOLTS_OFFSET, "unit": VOLTS_UNIT, "meaning": "frame = (mV - offset) / unit"},
        "stimulus": {
            "name": _STIMULUS_NAME,
            "probe": "soma",
            "unit": STIMULUS_UNIT,
            "meaning": "steps, a ramp, a pulse and filtered noise over 200 ms; the same for every cell",
        },
        "simulator": {"name": "podium", "version": VERSION, "seed": seed},
    }
