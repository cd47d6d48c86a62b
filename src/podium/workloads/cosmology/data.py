"""Cosmology data: boxes in the published layout, simulated ones in the cache, and the generated form.

Owns `workload.data`. A box is one HDF5 file with two datasets of single precision:

    Nbody (4, N, N, N)   density and the three velocities of the dark matter
    Hydro (5, N, N, N)   density, temperature and the three velocities of the gas

Samples are cubes of `crop` cells a side, cut out of a periodic box at random places; training ones are turned too.
"""

from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, model_validator

from podium.data.arrays import Field, Source
from podium.data.cache import cache_folder
from podium.data.generated import GeneratedSource
from podium.data.hdf5 import open_hdf5
from podium.data.made import made_once
from podium.data.shown import say
from podium.data.volumes import VolumeArray, VolumeCrops
from podium.errors import UserError
from podium.schema import Section
from podium.workloads.base import Split
from podium.workloads.cosmology.make import simulate_shown
from podium.workloads.cosmology.model import NUM_INPUTS, NUM_OUTPUTS

#: Channels of the gas, by what metrics and tables call them; the components of the velocity count as one.
FIELDS = {"density": slice(0, 1), "temperature": slice(1, 2), "velocity": slice(2, 5)}
#: `vectors`: channels that are the components of a vector along x, y, z
_NBODY = VolumeArray("Nbody", NUM_INPUTS, vectors=((1, 2, 3),))
_HYDRO = VolumeArray("Hydro", NUM_OUTPUTS, vectors=((2, 3, 4),))
#: Generated fields, about as scaled ones lie: most of the gas is warm, so that predicting 0 is not the best yet.
_RANGES = {"nbody": (-1.0, 1.0), "hydro": (-0.2, 0.8)}


class AugmentSection(Section):
    """How training crops are varied beyond where they are cut."""

    #: one of the 48 rotations and reflections of the cube, drawn for every crop
    turn: bool = True
    #: velocities are turned with the box; false: components stay as they are, as the published training has it
    vectors: bool = True


class CosmologyData(Section):
    """`workload.data` of cosmology."""

    #: files: boxes in the published layout; simulated: made once, kept in the cache; generated: random numbers
    source: Literal["files", "simulated", "generated"] = "simulated"
    #: files, simulated: boxes are read into memory, or crops from the file as they are needed. synthetic: no boxes but
    #: random numbers, as source generated has it
    mode: Literal["memory", "disk", "synthetic"] = "memory"
    #: files: folder of the boxes
    path: Path | None = None
    #: files: names in that folder; null for test: test.h5 where it is there, else the box for validation
    train_file: Path = Path("train.h5")
    valid_file: Path = Path("valid.h5")
    test_file: Path | None = None
    #: cells along a side of a sample
    crop: PositiveInt = 64
    #: simulated: cells along a side of the box for training; those for validation and test have half as many
    size: PositiveInt = 128
    #: what simulated boxes, places and turns of crops, and generated fields are drawn from
    seed: NonNegativeInt = 1
    #: crops in an epoch of training; for validation, and for test
    samples: PositiveInt = 65_536
    valid_samples: PositiveInt = 8_192
    augment: AugmentSection = AugmentSection()

    @property
    def is_random(self) -> bool:
        """Whether samples are random numbers, and nothing is read."""
        return self.source == "generated" or self.mode == "synthetic"

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        # Training on another box than the one that was named would go unnoticed.
        if self.source == "simulated" and self.path is not None:
            raise ValueError(
                "path goes with source: files, but source is simulated; set source to files, or path to null"
            )
        return self


class CosmologySamples:
    """The samples of a `workload.data` section, opened split by split as they are asked for."""

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
        """Of one sample; known without opening anything."""
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
            turn=training and section.augment.turn,
            turn_vectors=section.augment.vectors,
            fixed=not training,
        )

    def cell_mpc(self, split: Split) -> float | None:
        """Side of a cell in Mpc/h, of boxes that say so: those of Podium's simulator, whose units are known."""
        if self.section.is_random:
            return None
        with open_hdf5(self.file(split)) as file:
            if "box_mpc_per_h" not in file.attrs:
                return None
            return float(file.attrs["box_mpc_per_h"]) / int(file["Nbody"].shape[-1])

    def file(self, split: Split) -> Path:
        """The box of a split. Makes simulated ones if they do not exist yet."""
        section = self.section
        if section.source == "simulated":
            if self._folder is None:
                self._folder = simulated_folder(section.size, section.seed)
            return self._folder / f"{split}.h5"
        if section.path is None:
            raise UserError(
                "`workload.data.source` is files, but `workload.data.path` does not say which folder they are in."
            )
        folder = section.path.expanduser()
        if split == "test":
            own = folder / (section.test_file or "test.h5")
            return own if section.test_file is not None or own.is_file() else folder / section.valid_file
        return folder / (section.train_file if split == "train" else section.valid_file)


def simulated_folder(size: int, seed: int) -> Path:
    """The folder of simulated boxes in the cache, made now if it is not there."""
    from podium.workloads.cosmology import simulate  # compiles when first used: not wanted for files

    folder = cache_folder("cosmology", f"v{simulate.VERSION}-seed{seed}-{size}")
    if folder.is_dir():
        say(f"Simulated boxes: {size}³ cells for training, kept in {folder}")
        return folder
    return made_once(folder, lambda aside: simulate_shown(aside, size, seed=seed), "The simulated boxes")
