"""Samples per second: Podium's feed against a torch DataLoader whose workers do what most training scripts do.

    python -m bench.input                a few minutes; prints tables and writes bench/results/input.md
    python -m bench.input --only volumes      measures only crops of volumes and keeps the other tables
    python -m bench.input --only datasets     measures only Datasets of Python and numpy and keeps the other tables

The photographs are synthetic: noise with the spectrum of natural images, about 500 × 375 pixels, as JPEGs of quality
90, as files and as TFRecord shards; one set with the mean size in bytes of ImageNet's images, one with the usual size
of photographs of these dimensions and quality. Both sides take a random window of every image, resize it to 224 × 224
(bilinear, antialiased), flip half of them, and deliver normalised float32; both use the same number of threads or
worker processes. The DataLoader does all of it in its workers; Podium flips and normalises whole batches where they are
used, as its workloads do. The sides alternate, in a different order every round; a round reads all images twice,
shuffled, and the second pass counts.
"""

import argparse
import io
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.datasets import datasets_tables
from bench.rounds import compared, loader_round, started
from bench.small_images import BATCH as SMALL_BATCH
from bench.small_images import PillowImages as SmallImages
from bench.small_images import small_images_table, write_cifar
from bench.volumes import volumes_tables
from bench.where import when_and_where
from podium.data.feed import Feed
from podium.data.formats.tfrecord import build_example, write_records
from podium.data.images.source import folder_source, tfrecord_source
from podium.data.sample_order import order
from podium.data.source import SampleRequest, Source
from podium.machine.allocator import keep_memory
from podium.machine.cores import own_cores
from podium.workloads.cnn.augment import Images, Spread
from podium.workloads.cnn.section import AugmentSection

RESULTS = Path(__file__).parent / "results" / "input.md"
SIZE, BATCH = 224, 64
SHAPES = [(375, 500), (375, 500), (500, 375), (333, 500), (400, 500), (500, 333)]
#: amplitudes fall with this power of the frequency, which gives 117 and 65 kB per photograph
STEEPNESSES = (1.0, 1.35)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_VOLUMES, _DATASETS, _NOTES = "## Volumes", "## Datasets", "## What was tried"
NOTES = f"""{_NOTES}

Milliseconds of one core per photograph of 117 kB, least of six rounds of 400 photographs, alone on the machine: 0.95 \
in all, of which reading the codes of the window and passing over the others is 0.50, the cosine transform 0.08, \
colours 0.06, taking out stuffed bytes 0.03, resizing 0.20, Python between them 0.08. Done by libjpeg-turbo as far \
down as the window goes it was 1.48 (0.94 of a whole decode of 1.33 are codes), by Pillow 2.47. Two threads at once \
take 1.2 each, two processes too: the cores share a cache.

- Codes looked up one by one instead of in pairs took 0.85 for all of an image instead of 0.58; passing over them \
takes 0.45. Tables of 10, 11, 13 or 14 bits instead of 12 changed the reading by + 7, + 3, - 5 and + 13 %; those of 13 \
take twice as long to make where an image has tables of its own.
- Colours in numba's own arithmetic, which is of 64 bits, took 0.69 for all of an image; in vectors of 16 bits 0.13.
- Resizing was 0.30 ms until torch was given a batch dimension before the channels were moved last: otherwise it lays \
the result out with the channels first, and numpy puts them last again.
- Parts of 8 images for each thread, instead of parts that become smaller towards the end of a batch, cost 6 %.
- Mirroring and normalising by torch's operators took five passes over the pixels, 0.12 ms alone and 0.25 ms beside \
threads that decode; it is one pass now (`podium/kernels/image/mirror_normalise.py`).
- The next batch is begun before the end of one, so that no thread is idle in between.
- No gain: decoding into a buffer that is used again (`buffer=`); holding records in memory instead of reading them \
from the system's cache.
- Little gain, not used: libjpeg-turbo's coarser chroma (`fastupsample`) and coarser DCT (`fastdct`): 3 to 9 % of the \
decoding alone, nothing to be seen with two threads, and both change pixels.
- Not to be had: leaving out the codes above or beside the window. They must be read up to its end, if only for their \
lengths.
"""


# --------------------------------------------------------------------------------------------- the images


def photographs(count: int, steepness: float) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    scenes = [_scene(rng, 768, steepness) for _ in range(12)]
    for number in range(count):
        height, width = SHAPES[number % len(SHAPES)]
        scene = scenes[rng.integers(len(scenes))]
        top, left = rng.integers(0, 768 - height), rng.integers(0, 768 - width)
        view = scene[top : top + height, left : left + width]
        file = io.BytesIO()
        Image.fromarray(view[:, :: rng.choice([-1, 1])]).save(file, "JPEG", quality=90)
        yield file.getvalue()


def _scene(rng: np.random.Generator, side: int, steepness: float) -> NDArray[np.uint8]:
    """Return noise whose amplitude falls with the frequency, mostly in brightness, slightly in colour."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = 1.0
    planes = []
    for strength in (50.0, 18.0, 18.0):
        spectrum = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        plane = np.fft.irfft2(spectrum / frequency**steepness, (side, side))
        planes.append(plane / plane.std() * strength)
    bright, red, blue = planes
    image = np.stack([bright + red, bright - (red + blue) / 2, bright + blue], axis=-1) + 118
    return np.clip(image, 0, 255).astype(np.uint8)


def write_images(folder: Path, steepness: float, count: int) -> float:
    """Write the images as files and as shards, and return their mean size in bytes."""
    records, total = [], 0
    for number, data in enumerate(photographs(count, steepness)):
        label = number % 10
        path = folder / "files" / "train" / f"n{label:08}" / f"{number:06}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        records.append(build_example({"image/encoded": [data], "image/class/label": [label + 1]}))
        total += len(data)
    (folder / "shards").mkdir()
    for shard in range(8):
        write_records(folder / "shards" / f"train-{shard:05}-of-00008", records[shard::8])
    return total / count


# --------------------------------------------------------------------------------------------- the two sides


class PillowImages(Dataset):
    """A data set that does what most training scripts do, sample by sample."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("files/train/*/*.JPEG"))
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        left, top, width, height = self.window(image.width, image.height)
        image = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(self.mean).div_(self.std), int(path.parent.name[1:])

    @staticmethod
    def window(image_width: int, image_height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = image_width * image_height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image_width and 0 < height <= image_height:
                left, top = random.randint(0, image_width - width), random.randint(0, image_height - height)
                return left, top, width, height
        return 0, 0, image_width, image_height


class FeedRounds:
    """One epoch of a source per call, as in training: each with its own order and windows."""

    def __init__(self, source: Source, finish: bool) -> None:
        self.source, self.epoch = source, 0
        self.images = Images(AugmentSection(), Spread(MEAN, STD), pad_crop=0) if finish else None

    def __call__(self) -> float:
        began = time.perf_counter()
        count = 0
        with Feed(self.source, self.blocks(), BATCH) as feed:
            for block in feed:
                images, labels = block.rows["image"], block.rows["label"]
                if self.images:
                    images = self.images.varied(images, labels).image
                count += len(images)
        assert count == len(self.source)
        self.epoch += 1
        return time.perf_counter() - began

    def blocks(self) -> Iterator[SampleRequest]:
        num = len(self.source)
        for first in range(0, num, BATCH):
            positions = np.arange(first, min(first + BATCH, num), dtype=np.int64)
            yield SampleRequest(order(0, self.epoch, positions, num), positions + self.epoch * num)


def photographs_table(folder: Path, loader: DataLoader, mean_bytes: float, rounds: int, threads: int) -> list[str]:
    """Measure files and shards of photographs: Podium against the DataLoader."""
    count = len(loader.dataset)  # type: ignore[arg-type]
    files = folder_source(folder / "files", "train", SIZE, threads=threads)
    shards = tfrecord_source(folder / "shards", "train", SIZE, threads=threads)
    memory = tfrecord_source(folder / "shards", "train", SIZE, threads=threads, cache="memory")
    sides: dict[str, Callable[[], float]] = {
        "DataLoader, Pillow, files": lambda: loader_round(loader),
        "Podium, files": FeedRounds(files, finish=True),
        "Podium, shards": FeedRounds(shards, finish=True),
        "Podium, shards, cache: memory": FeedRounds(memory, finish=True),
        "Podium, shards, flip and normalising left to a device": FeedRounds(shards, finish=False),
    }
    what = f"{count:,} photographs of {mean_bytes / 1000:.0f} kB in the mean, batches of {BATCH}, {threads} threads or "
    return compared(f"{what}worker processes.", sides, count, rounds)


def volumes_section(rounds: int, threads: int) -> str:
    """Measure crops of boxes, for a section with its own line on when and where it was measured."""
    opening = when_and_where(os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix="podium-input-") as name:
        tables = volumes_tables(Path(name) / "box.h5", rounds, threads)
    made = f"{opening}; medians of {rounds} rounds in turns. Made by `python -m bench.input --only volumes`."
    return "\n".join([_VOLUMES, "", made, "", *tables])


def datasets_section(rounds: int, processes: int) -> str:
    """Measure Datasets of Python and numpy, for a section with its own line on when and where it was measured."""
    opening = when_and_where(os.getloadavg()[0])
    tables = datasets_tables(rounds, processes)
    made = f"{opening}; medians of {rounds} rounds in turns. Made by `python -m bench.input --only datasets`."
    return "\n".join([_DATASETS, "", made, "", *tables])


def merged(text: str, section: str) -> str:
    """Return `text` with a section replaced by this one, or with it before the notes if it had none."""
    title = section.partition("\n")[0]
    parts = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(title)]
    (notes,) = [number for number, part in enumerate(parts) if part.startswith(_NOTES)]
    parts.insert(notes, f"{section.rstrip()}\n\n")
    return "".join(f"{part.rstrip()}\n\n" for part in parts).rstrip() + "\n"


def images_text(rounds: int, num_images: int, threads: int) -> str:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="podium-input-") as name:
        folders = [Path(name) / str(steepness) for steepness in STEEPNESSES]
        sizes = [write_images(*of, num_images) for of in zip(folders, STEEPNESSES, strict=True)]
        loaders = [started(PillowImages(folder), BATCH, threads) for folder in folders]
        write_cifar(Path(name) / "cifar")
        small_loader = started(SmallImages(Path(name) / "cifar"), SMALL_BATCH, threads)
        # As every training does; the loaders' processes, which already run, are not affected.
        keep_memory()
        photos = [
            line
            for of in zip(folders, loaders, sizes, strict=True)
            for line in [*photographs_table(*of, rounds, threads), ""]
        ]
        small = small_images_table(Path(name) / "cifar", small_loader, rounds)
    made = f"{when_and_where(load)}; medians of {rounds} rounds in turns. Made by `python -m bench.input`."
    return "\n".join(["# Input", "", made, "", *photos, *small, "", NOTES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=len(own_cores()))
    parser.add_argument("--only", choices=["volumes", "datasets"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {"volumes": volumes_section, "datasets": datasets_section}
    if options.only:
        text = RESULTS.read_text(encoding="utf-8")
    else:
        text = images_text(options.rounds, options.images, options.threads)
    for name in [options.only] if options.only else measured:
        text = merged(text, measured[name](options.rounds, options.threads))
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
