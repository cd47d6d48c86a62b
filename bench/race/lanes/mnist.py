"""mnist at micro-batch 8 and 64: small updates, where every microsecond besides the arithmetic shows."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.race.lane import Lane
from podium.data.formats.idx import write_idx


def write_images(folder: Path) -> None:
    """Write as many images as MNIST has, as its files, about as bright: a pattern per class under noise.

    The noise is everywhere, since among equal pixels a max-pool's choice would depend on rounding.
    """
    (folder / "mnist").mkdir()
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 128, (10, 28, 28), dtype=np.uint8) * (draw.random((10, 28, 28)) < 0.25)
    for part, num_samples in (("train", 60_000), ("t10k", 1_000)):
        labels = draw.integers(0, 10, num_samples, dtype=np.uint8)
        images = patterns[labels] + draw.integers(0, 64, (num_samples, 28, 28), dtype=np.uint8)
        write_idx(folder / "mnist" / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / "mnist" / f"{part}-labels-idx1-ubyte", labels)


def mean_loss(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(image), label)


def optimiser(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.003, momentum=0.9)


LANES = [
    Lane(
        name=f"mnist-{micro_batch}",
        title=f"mnist, micro-batch {micro_batch}",
        recipe="mnist",
        overrides=(f"batch.micro={micro_batch}", "optim.lr=0.003", "workload.data.path={folder}/mnist"),
        not_random=("workload.model.dropout=0",),
        mean_loss=mean_loss,
        optimiser=optimiser,
        make_data=write_images,
        may_be_divided=True,
        flax_model="mnist",
        flattened={"hidden.1": (64, 5, 5)},
    )
    for micro_batch in (8, 64)
]
