"""The tables of volumes in `bench.input`: random crops of 64³ cells with their rotations and reflections, from a box of
256³ cells, 4 channels and 5, in an HDF5 file.

The DataLoader does it as most scripts do: slices of h5py's datasets, or of arrays in memory, numpy's transpose and flip
and a copy of the result, sample by sample in its workers. It takes no crops across the end of the box and does not
rotate vectors; Podium does both.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bench.rounds import compared, loader_round, started
from podium.data.feed import Feed
from podium.data.sample_plan import samples_per_block, train_blocks
from podium.data.volumes.crops import Mode, VolumeArray, VolumeCrops
from podium.machine.allocator import keep_memory
from podium.recipe.sections.batch import BatchSection

SIZE, CROP, BATCH, NUM_CROPS = 256, 64, 4, 96
ARRAYS = {"nbody": VolumeArray("Nbody", 4, ((1, 2, 3),)), "hydro": VolumeArray("Hydro", 5, ((2, 3, 4),))}


def write_box(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for array in ARRAYS.values():
            shape = (array.num_channels, SIZE, SIZE, SIZE)
            dataset = file.create_dataset(array.dataset, shape, np.float32)
            for channel in range(array.num_channels):
                dataset[channel] = rng.random(shape[1:], np.float32)


class SlicedVolumes(Dataset):
    """A data set read sample by sample, with h5py and numpy."""

    def __init__(self, path: Path, in_memory: bool) -> None:
        self.path = path
        self.arrays: tuple[NDArray | h5py.Dataset, ...] | None = None
        if in_memory:
            with h5py.File(path) as file:
                self.arrays = (file["Nbody"][:], file["Hydro"][:])

    def __len__(self) -> int:
        return NUM_CROPS

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.arrays is None:  # a file must be opened by the worker that reads it
            file = h5py.File(self.path)
            self.arrays = (file["Nbody"], file["Hydro"])
        x, y, z = (random.randint(0, SIZE - CROP) for _ in range(3))
        axes = random.sample((1, 2, 3), 3)
        flips = tuple(axis for axis in (1, 2, 3) if random.random() < 0.5)
        found = []
        for array in self.arrays:
            volume = array[:, x : x + CROP, y : y + CROP, z : z + CROP]
            volume = np.flip(np.transpose(volume, (0, *axes)), flips)
            found.append(torch.from_numpy(np.ascontiguousarray(volume)))
        return tuple(found)


def _rounds(source: VolumeCrops) -> Callable[[], float]:
    """Return a function that reads the next epoch at every call, as training does."""
    size = samples_per_block(source, BATCH)
    per_epoch = NUM_CROPS // BATCH
    epochs = count()

    def read() -> float:
        epoch = next(epochs)
        blocks = train_blocks(
            seed=1, num_samples=NUM_CROPS, batch=BatchSection(micro=BATCH), replicas=range(1),
            first_update=epoch * per_epoch, last_update=(epoch + 1) * per_epoch, updates_per_block=size // BATCH,
        )  # fmt: skip
        began = time.perf_counter()
        with Feed(source, blocks, size) as feed:
            num_read = sum(len(block.samples) for block in feed)
        assert num_read == NUM_CROPS
        return time.perf_counter() - began

    return read


def volumes_tables(path: Path, rounds: int, threads: int) -> list[str]:
    """Measure crops in memory and from the file: Podium against the DataLoader."""
    write_box(path)
    loaders = {mode: started(SlicedVolumes(path, mode == "memory"), BATCH, threads) for mode in ("memory", "disk")}
    # As every training does; the loaders' processes, which already run, are not affected.
    keep_memory()
    lines = []
    modes: tuple[tuple[Mode, str], ...] = (("memory", "In memory"), ("disk", "From the file, in the system's cache"))
    for mode, where in modes:
        sides: dict[str, Callable[[], float]] = {
            f"DataLoader, h5py and numpy, {mode}": partial(loader_round, loaders[mode]),
            f"Podium, {mode}": _rounds(VolumeCrops(path, ARRAYS, CROP, NUM_CROPS, seed=0, mode=mode, threads=threads)),
            f"Podium, {mode}, one thread": _rounds(
                VolumeCrops(path, ARRAYS, CROP, NUM_CROPS, seed=0, mode=mode, threads=1)
            ),
        }
        what = (
            f"{where}: {NUM_CROPS} crops of {CROP}³ cells, 9 channels, out of {SIZE}³; batches of {BATCH}, {threads} "
            "threads or worker processes."
        )
        lines += [*compared(what, sides, NUM_CROPS, rounds, unit="crop"), ""]
    return lines
