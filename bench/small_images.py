"""The table of CIFAR-sized images in `bench.input`: files in CIFAR's format, padded and cropped, mirrored, normalised.

The DataLoader does it as most scripts do: images in memory, one by one through Pillow in its workers. Podium gathers
blocks of bytes ahead of time and augments whole micro-batches where they are used.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.rounds import compared, loader_round
from podium.data.feed import Feed
from podium.data.formats import cifar
from podium.data.sample_plan import samples_per_block, train_blocks
from podium.recipe.sections.batch import BatchSection
from podium.workloads.cnn import shapes
from podium.workloads.cnn.section import CnnData, CnnModel
from podium.workloads.cnn.workload import Workload

BATCH, _BORDER = 128, 4
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def write_cifar(folder: Path) -> None:
    """Write rendered shapes in the file format of CIFAR-10."""
    folder.mkdir()
    per_file = 8000
    for number, name in enumerate(cifar.file_names("cifar10")):
        images, labels = shapes.render(np.arange(number * per_file, (number + 1) * per_file), 0)
        planes = images.transpose(0, 3, 1, 2).reshape(per_file, -1)
        np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1).tofile(folder / name)


class PillowImages(Dataset):
    def __init__(self, folder: Path) -> None:
        self.images, self.labels = cifar.load(folder, "cifar10", "train")
        self.mean, self.std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.images[index]), _BORDER)
        left, top = random.randint(0, 2 * _BORDER), random.randint(0, 2 * _BORDER)
        image = image.crop((left, top, left + cifar.SIZE, top + cifar.SIZE))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(self.mean).div_(self.std), int(self.labels[index])


def _feed_round(workload: Workload) -> float:
    source = workload.source("train")
    batch = BatchSection(micro=BATCH)
    size = samples_per_block(source, BATCH, 50)
    num_updates = len(source) // BATCH
    blocks = train_blocks(
        seed=1, num_samples=len(source), batch=batch, replicas=range(1), first_update=0, last_update=num_updates,
        updates_per_block=size // BATCH,
    )  # fmt: skip
    began = time.perf_counter()
    count = 0
    with Feed(source, blocks, size) as feed:
        for block in feed:
            for first in range(0, len(block.samples), BATCH):
                image, label = (block.rows[name][first : first + BATCH] for name in ("image", "label"))
                count += len(workload._images.varied(image, label).image)
    assert count == num_updates * BATCH
    return (time.perf_counter() - began) * len(source) / count


def small_images_table(folder: Path, loader: DataLoader, rounds: int) -> list[str]:
    """Measure CIFAR's files: Podium against the DataLoader."""
    workload = Workload(CnnModel(size=20), CnnData(source="files", path=folder))
    count = len(workload.source("train"))
    sides: dict[str, Callable[[], float]] = {
        "DataLoader, Pillow": lambda: loader_round(loader),
        "Podium": lambda: _feed_round(workload),
    }
    what = (
        f"{count:,} images of CIFAR's size, in its files; batches of {BATCH}. Podium: one thread beside the training "
        f"gathers, one varies the images; DataLoader: {loader.num_workers} worker processes."
    )
    return compared(what, sides, count, rounds)
