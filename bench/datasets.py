"""The tables of Datasets in `bench.input`: one Dataset, made of Python and numpy, read by torch's DataLoader and by
Podium's DatasetSource with as many processes.

Both sides call the same `__getitem__` for every sample of an epoch in a new order and deliver batches of one size.
Podium also seeds torch, numpy and random for every sample; the DataLoader seeds once for each of its processes.
"""

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bench.rounds import compared, loader_round, started
from podium.data.feed import Feed
from podium.data.sample_order import order
from podium.data.source import SampleRequest
from podium.data.sources.dataset import DatasetSource

BATCH = 64


class Rows(Dataset):
    """Rows of a table, scaled and with a little noise (128 bytes each)."""

    num_samples = 20_000

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).random((self.num_samples, 32), np.float32)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = (self.rows[index] - 0.5) * 2
        row[random.randrange(32)] = 0.0
        return torch.from_numpy(row) + 0.01 * torch.randn(32), index % 10


class Signals(Dataset):
    """Signals of 2,048 numbers, shifted, stretched and filtered by numpy (8 kB each)."""

    num_samples = 3_000

    def __init__(self) -> None:
        self.signals = np.random.default_rng(0).normal(size=(256, 2048)).cumsum(axis=1)
        self.decay = np.exp(-np.arange(1025) / 200)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        signal = np.roll(self.signals[index % 256], np.random.randint(2048))
        places = np.arange(2048) * np.random.uniform(0.8, 1.0)
        signal = np.interp(places, np.arange(2048), signal)
        signal = np.fft.irfft(np.fft.rfft(signal) * self.decay) + np.random.normal(size=2048)
        return torch.from_numpy((signal / signal.std()).astype(np.float32)), index % 10


class Images(Dataset):
    """Windows of 3 × 224 × 224 out of larger images, mirrored and normalised (602 kB each)."""

    num_samples = 1_500

    def __init__(self) -> None:
        self.images: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (32, 3, 300, 300), np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = random.randint(0, 76), random.randint(0, 76)
        window = torch.from_numpy(self.images[index % 32, :, top : top + 224, left : left + 224])
        if torch.rand(()) < 0.5:
            window = window.flip(2)
        return window.float().div_(255).sub_(0.45).div_(0.22), index % 10


class Epochs:
    """One epoch of a Dataset per call, as in training."""

    def __init__(self, dataset: Dataset, processes: int) -> None:
        self.source, self.epoch = DatasetSource(dataset, seed=0, workers=processes), 0

    def __call__(self) -> float:
        began = time.perf_counter()
        with Feed(self.source, self.blocks(), BATCH, prefetch=4) as feed:
            count = sum(len(block.rows["target"]) for block in feed)
        assert count == len(self.source)
        self.epoch += 1
        return time.perf_counter() - began

    def blocks(self) -> Iterator[SampleRequest]:
        num = len(self.source)
        for first in range(0, num, BATCH):
            positions = np.arange(first, min(first + BATCH, num), dtype=np.int64)
            yield SampleRequest(order(0, self.epoch, positions, num), positions + self.epoch * num, self.epoch)


def datasets_tables(rounds: int, processes: int) -> list[str]:
    """Measure every Dataset: Podium against the DataLoader."""
    lines: list[str] = []
    for dataset in (Rows(), Signals(), Images()):
        loader = started(dataset, BATCH, processes)

        def read(loader: torch.utils.data.DataLoader = loader) -> float:
            return loader_round(loader)

        sides: dict[str, Callable[[], float]] = {"DataLoader": read, "Podium": Epochs(dataset, processes)}
        what = f"{type(dataset).__name__}: {str(dataset.__doc__).split('.')[0]}. {len(dataset):,} of them, "
        lines += compared(
            f"{what}batches of {BATCH}, {processes} processes that prepare samples.",
            sides,
            len(dataset),
            rounds,
            unit="sample",
        )
        lines.append("")
    return lines
