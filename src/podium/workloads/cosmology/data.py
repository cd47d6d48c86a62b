"""Cosmology data: boxes in the published layout, simulated ones in the cache, and the generated form.

A box is one HDF5 file with two datasets of single precision:

    Nbody (4, N, N, N)   density and the three velocities of the dark matter
    Hydro (5, N, N, N)   density, temperature and the three velocities of the gas

Samples are cubes of `crop` cells a side, cropped at random positions; in training also rotated.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from podium.contract import Split
from podium.data.source import Field, Source
from podium.data.sources.generated import GeneratedSource
from podium.data.sources.hdf5 import open_hdf5
from podium.data.volumes.crops import VolumeArray, VolumeCrops
from podium.data.volumes.cube_symmetries import PUBLISHED, SYMMETRIES
from podium.errors import UserError
from podium.machine.atomic_files import create_once
from podium.machine.cache_folder import cache_folder
from podium.ui.console import say
from podium.workloads.cosmology.make import simulate_shown
from podium.workloads.cosmology.model import NUM_INPUTS, NUM_OUTPUTS
from podium.workloads.cosmology.section import CosmologyData

#: Channels of the gas by their names in metrics and tables; the components of the velocity count as one.
FIELDS = {"density": slice(0, 1), "temperature": slice(1, 2), "velocity": slice(2, 5)}
#: `vectors`: channels that are the components of a vector along x, y, z
_NBODY = VolumeArray("Nbody", NUM_INPUTS, vectors=((1, 2, 3),))
_HYDRO = VolumeArray("Hydro", NUM_OUTPUTS, vectors=((2, 3, 4),))
#: the numbers of the symmetries that crops are drawn with, by `augment.group`
_TURNS: dict[str, Sequence[int]] = {
    "cube48": range(len(SYMMETRIES)),
    "published24": [SYMMETRIES.index(symmetry) for symmetry in PUBLISHED],
    "none": range(1),
}
#: Generated fields resemble scaled ones: most of the gas is warm, so that predicting 0 is not already the best.
_RANGES = {"nbody": (-1.0, 1.0), "hydro": (-0.2, 0.8)}


class CosmologySamples:
    """The samples of a `workload.data` section; each split is opened on first use."""

    def __init__(self, section: CosmologyData) -> None:
        self.section = section
        self._folder: Path | None = None
        self._sources: dict[Split, Source] = {}

    def source(self, split: Split) -> Source:
        if split not in self._sources:
            self._sources[split] = self._open(split)
        return self._sources[split]

    @property
    def fields(self) -> dict[str, Field]:
        """Return the fields of one sample; known without opening any file."""
        cube = (self.section.crop,) * 3
        return {"nbody": Field((NUM_INPUTS, *cube), np.float32), "hydro": Field((NUM_OUTPUTS, *cube), np.float32)}

    def _open(self, split: Split) -> Source:
        section, training = self.section, split == "train"
        num_samples = section.samples if training else section.valid_samples
        if section.is_random:
            # Rows of one pool by number: splits differ in the numbers.
            first = {"train": 0, "valid": section.samples, "test": section.samples + section.valid_samples}[split]
            return GeneratedSource(self.fields, num_samples, ranges=_RANGES, seed=section.seed, first_sample=first)
        return VolumeCrops(
            self.file(split),
            {"nbody": _NBODY, "hydro": _HYDRO},
            section.crop,
            num_samples,
            seed=section.seed,
            mode="disk" if section.mode == "disk" else "memory",
            turns=_TURNS[section.augment.group],
            turn_vectors=section.augment.vectors,
            periodic=section.periodic,
            fixed=not training,
            turn_fixed=not training and section.augment.valid,
        )

    def cell_mpc(self, split: Split) -> float | None:
        """Return the side of a cell in Mpc/h, if the box records it, as Podium's simulator does; otherwise None."""
        if self.section.is_random:
            return None
        with open_hdf5(self.file(split)) as file:
            if "box_mpc_per_h" not in file.attrs:
                return None
            return float(file.attrs["box_mpc_per_h"]) / int(file["Nbody"].shape[-1])

    def file(self, split: Split) -> Path:
        """Return the box of a split; simulate it first if necessary."""
        section = self.section
        if section.source == "simulated":
            if self._folder is None:
                self._folder = simulated_folder(section.size, section.seed)
            return self._folder / f"{split}.h5"
        if section.path is None:
            raise UserError("workload.data.path is missing: workload.data.source = files needs the folder of the files")
        folder = section.path.expanduser()
        if split == "test":
            own = folder / (section.test_file or "test.h5")
            return own if section.test_file is not None or own.is_file() else folder / section.valid_file
        return folder / (section.train_file if split == "train" else section.valid_file)


def simulated_folder(size: int, seed: int) -> Path:
    """Return the folder of simulated boxes in the cache; simulate them first if they are missing."""
    from podium.workloads.cosmology.simulator import simulate  # compiles on first use, which files do not need

    folder = cache_folder("cosmology", f"v{simulate.VERSION}-seed{seed}-{size}")
    if folder.is_dir():
        say(f"Simulated boxes: {size}³ cells for training, kept in {folder}")
        return folder
    return create_once(folder, lambda aside: simulate_shown(aside, size, seed=seed), "The simulated boxes")
