"""Neuron data: the published layout of files, the simulated data set in the cache, and the generated form.

The layout is a folder with

    meta.cellSpike_<probe>.yaml      dataInfo: h5nameTemplate (`*` stands for the cell), numFeature, maybe parName
    <cell>_….cellSpike_….data.h5     for each domain train, val, test:
                                     <domain>_frames (samples, bins, probes), <domain>_unitStar_par (samples, 15)
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.contract import Split
from podium.data.source import Field, Source, empty_buffers
from podium.data.sources.generated import GeneratedSource
from podium.data.sources.hdf5 import Hdf5Array, Hdf5Source, budget_bytes, find_dataset, open_hdf5
from podium.errors import UserError
from podium.machine.atomic_files import create_once
from podium.machine.cache_folder import cache_folder
from podium.recipe.reading import read_yaml
from podium.ui.console import say
from podium.ui.progress_bar import progress_bar
from podium.workloads.neuron.section import SIMULATED_PROBE, NeuronData

DOMAINS: dict[Split, str] = {"train": "train", "valid": "val", "test": "test"}
#: The published probes, in the order of the frames' last axis.
PROBE_NAMES = ("soma", "axon", "apical", "basal")
NUM_BINS = 1600
NUM_PARAMETERS = 15
BIN_MS = 0.125
#: Voltages are standardised by the mean and standard deviation of this many training samples, the first ones.
_STATISTICS_SAMPLES = 1024
_SIMULATED_CELL = "simulated"


@dataclass(frozen=True)
class Layout:
    """The content of the meta file, and where the samples are."""

    meta: Path
    file: Path
    num_probes: int
    parameter_names: tuple[str, ...]
    probe_names: tuple[str, ...]
    #: frame = (mV - offset) / unit, if the meta file has these
    volts: tuple[float, float] | None = None


class NeuronSamples:
    """The samples of a `workload.data` section; each split is opened on first use."""

    def __init__(self, section: NeuronData) -> None:
        self.section = section
        self._layout: Layout | None = None
        self._sources: dict[Split, Source] = {}

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the files, simulated first if necessary; None for generated samples."""
        if self._layout is None and self.section.source != "generated":
            self._layout = self._find()
        return self._layout

    @property
    def parameter_names(self) -> tuple[str, ...]:
        if self.layout is None:
            return _numbered(NUM_PARAMETERS)
        return self.layout.parameter_names

    @property
    def probe_names(self) -> tuple[str, ...]:
        """Return the names of the probes that are delivered."""
        names = PROBE_NAMES if self.layout is None else self.layout.probe_names
        return names if (chosen := self._columns(len(names))) is None else tuple(names[i] for i in chosen)

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Return (bins, probes) of a delivered frame; costs no more than opening a file."""
        if self.layout is None:
            return (NUM_BINS, len(self.probe_names))
        source = self._sources.get("train") or self._open_file("train", max_samples=1, memory_budget=0)
        return source.fields["frames"].shape

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    def statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean and standard deviation of the voltage by delivered probe, from the first training samples."""
        source: Source
        if self.layout is None:
            source = self.source("train")
        else:
            source = self._open_file("train", max_samples=_STATISTICS_SAMPLES, memory_budget=0)
        num_samples = min(len(source), _STATISTICS_SAMPLES)
        buffers = empty_buffers(source.fields, num_samples)
        source.gather(np.arange(num_samples), buffers)
        frames = buffers["frames"].astype(np.float64)
        # Rounded: the last bits of sums differ between processors, but the model must not.
        mean, std = np.round(frames.mean(axis=(0, 1)), 3), np.round(frames.std(axis=(0, 1)), 3)
        return mean.astype(np.float32), np.where(std > 0, std, 1).astype(np.float32)

    def resimulate(self, unit: NDArray) -> NDArray:
        """Simulate cells with these unit parameters; return (n, bins, probes) in mV at the delivered probes."""
        from podium.workloads.neuron.simulator import simulate

        voltages = simulate.simulate(unit)
        columns = self._columns(voltages.shape[-1])
        return voltages if columns is None else voltages[..., columns]

    def _find(self) -> Layout:
        section = self.section
        if section.source == "simulated":
            folder = simulated_folder(section.samples, section.seed)
            return find_layout(folder, SIMULATED_PROBE, _SIMULATED_CELL)
        if section.path is None:
            raise UserError("workload.data.path is missing: workload.data.source = files needs the folder of the files")
        return find_layout(section.path.expanduser(), section.probe, section.cell)

    def _open(self, split: Split) -> Source:
        section = self.section
        if section.source == "generated":
            total = section.samples if split == "train" else max(1, section.samples // 10)
            fields = {
                "frames": Field(self.frame_shape, np.float32),
                "target": Field((NUM_PARAMETERS,), np.float32),
            }
            ranges = {"target": (-1.0, 1.0)}
            return GeneratedSource(fields, self._limit(split, total), ranges=ranges, seed=section.seed)
        stored = self._open_file(split, memory_budget=0).num_stored
        limit = self._limit(split, stored)
        budget = budget_bytes(section.memory_budget_gb)
        if budget is not None:  # one budget for all splits
            opened = (source for source in self._sources.values() if isinstance(source, Hdf5Source))
            budget = max(0, budget - sum(source.resident_bytes for source in opened))
        return self._open_file(split, max_samples=limit, memory_budget=budget)

    def _open_file(
        self, split: Split, *, max_samples: int | None = None, memory_budget: int | None = None
    ) -> Hdf5Source:
        layout, domain = self.layout, DOMAINS[split]
        assert layout is not None
        source = Hdf5Source(
            layout.file,
            {
                "frames": Hdf5Array(f"{domain}_frames", (None, layout.num_probes), self._columns(layout.num_probes)),
                "target": Hdf5Array(f"{domain}_unitStar_par", (None,)),
            },
            max_samples=max_samples,
            memory_budget=memory_budget,
        )
        (stored,) = source.fields["target"].shape
        if stored != len(layout.parameter_names):
            raise UserError(
                f"{layout.file}: {domain}_unitStar_par has {stored} parameters, "
                f"but {layout.meta} names {len(layout.parameter_names)}"
            )
        return source

    def _limit(self, split: Split, stored: int) -> int:
        wanted = self.section.max_samples
        if wanted is None or split == "train":
            return stored if wanted is None else min(wanted, stored)
        if self.section.source == "generated":
            num_train = self.section.samples
        else:
            num_train = self._open_file("train", memory_budget=0).num_stored
        return min(stored, math.ceil(stored * wanted / num_train))

    def _columns(self, num_probes: int) -> tuple[int, ...] | None:
        """Return the numbers of the delivered probes; None for all of them."""
        probes = self.section.probes
        if probes is None:
            return None
        chosen = tuple(range(probes)) if isinstance(probes, int) else probes
        if max(chosen) >= num_probes:
            raise UserError(
                f"workload.data.probes asks for probe {max(chosen)}: expected numbers from 0 to {num_probes - 1}"
            )
        return None if chosen == tuple(range(num_probes)) else chosen


# ------------------------------------------------------------------------------------------- the published layout


def find_layout(folder: Path, probe: str, cell: str | None) -> Layout:
    """Read the meta file in `folder` and find the file of `cell` (None: the only one)."""
    meta = folder / f"meta.cellSpike_{probe}.yaml"
    info = _read_meta(meta)
    template, num_probes = info.get("h5nameTemplate"), info.get("numFeature")
    if not isinstance(template, str) or template.count("*") != 1 or "/" in template:
        raise UserError(f"{meta}: dataInfo.h5nameTemplate must be a file name with one * for the cell")
    if not isinstance(num_probes, int) or num_probes < 1:
        raise UserError(f"{meta}: dataInfo.numFeature must be the number of probes")
    parameters = _names(meta, info, "parName", "parNames", "paramName", "paramNames")
    probes = _names(meta, info, "probeName", "probeNames", "featureName", "featureNames") or PROBE_NAMES
    if len(probes) != num_probes:
        probes = tuple(f"probe {i}" for i in range(num_probes))
    file = _cell_file(folder, template, cell)
    return Layout(meta, file, num_probes, parameters or _numbered(_num_parameters(file)), probes, _volts(info))


def _numbered(count: int) -> tuple[str, ...]:
    """Return names for parameters that have none."""
    return tuple(f"p{number}" for number in range(count))


def _num_parameters(path: Path) -> int:
    """Return how many parameters the samples of a file have."""
    name = f"{DOMAINS['train']}_unitStar_par"
    with open_hdf5(path) as file:
        shape = find_dataset(path, file, name).shape
    if len(shape) != 2:
        raise UserError(f"{path}: {name} has shape {shape}, expected (samples, parameters)")
    return int(shape[1])


def _cell_file(folder: Path, template: str, cell: str | None) -> Path:
    before, after = template.split("*")
    found = sorted(folder.glob(template))
    cells = [path.name.removeprefix(before).removesuffix(after) for path in found]
    if cell is None:
        if len(found) == 1:
            return found[0]
        if not found:
            raise UserError(f"there is no file {folder / template}")
        raise UserError(f"{folder} holds several cells: set workload.data.cell to one of {', '.join(cells)}")
    path = folder / f"{before}{cell}{after}"
    if not path.is_file():
        others = f"; there are files for {', '.join(cells)}" if cells else ""
        raise UserError(f"there is no file {path}{others}")
    return path


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"there is no file {path}")
    tree = read_yaml(path)
    info = tree.get("dataInfo")
    if not isinstance(info, dict):
        raise UserError(f"{path} has no section dataInfo")
    return info


def _names(meta: Path, info: dict[str, Any], *spellings: str) -> tuple[str, ...] | None:
    for key in spellings:
        if key in info:
            names = info[key]
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                raise UserError(f"{meta}: dataInfo.{key} must be a list of names")
            return tuple(names)
    return None


def _volts(info: dict[str, Any]) -> tuple[float, float] | None:
    match info.get("voltsScale"):
        case {"offset": int() | float() as offset, "unit": int() | float() as unit}:
            return float(offset), float(unit)
    return None


# ----------------------------------------------------------------------------------------- the simulated data set


def simulated_folder(samples: int, seed: int) -> Path:
    """Return the folder of a simulated data set in the cache; simulate it first if it is missing."""
    from podium.workloads.neuron.simulator import simulate  # compiles on first use, which files do not need

    folder = cache_folder("neuron", f"v{simulate.VERSION}-seed{seed}-{samples}")
    if folder.is_dir():
        say(f"Simulated cells: {samples:,} for training, kept in {folder}")
        return folder

    def make(aside: Path) -> None:
        simulate_shown(aside, samples, seed=seed, cell=_SIMULATED_CELL)

    return create_once(folder, make, "The simulated cells")


def simulate_shown(folder: Path, samples: int, **options: Any) -> None:
    """Simulate a data set into `folder` with a progress bar; print the speed reached."""
    from podium.workloads.neuron.simulator import simulate

    say(f"Simulating {samples:,} cells for training, and more for validation and test")
    with progress_bar("simulating", counted=True) as progress:
        made = simulate.make_dataset(folder, samples, progress=progress, **options)
    say(f"Simulated {made.cells:,} cells in {made.seconds:.1f} s: {made.cells_per_second:,.0f} cells/s")
