"""ResNet-20 on images of CIFAR's size and ResNet-50 on ImageNet's: convolutions, batch norm and the layers between.

Images are rendered or generated and not augmented: a plain loop over tensors in memory has no augmentation. There are
so few that the loss falls within 20 updates (ResNet-50: within 6), at a rate at which rounding does not grow.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bench.race.lane import Lane, build_workload
from podium.recipe.loading import Recipe

_PLAIN = (
    "workload.data.augment.pad_crop=0",
    "workload.data.augment.flip=false",
    "workload.data.augment.label_smoothing=0",
)


def mean_loss(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(image), label)


def as_tensors(recipe: Recipe, buffers: dict[str, NDArray]) -> dict[str, NDArray]:
    """Return normalised images (n, 3, height, width), as most scripts hold them in memory."""
    workload = build_workload(recipe)
    batch = {name: torch.from_numpy(rows) for name, rows in buffers.items()}
    (image,) = workload.inputs(batch)
    return {**buffers, "image": np.ascontiguousarray(image.numpy())}


def _lane(
    name: str,
    title: str,
    recipe: str,
    lr: float,
    *overrides: str,
    num_compared: int = 20,
    least_updates: int = 1,
    flax_model: str = "",
) -> Lane:
    def optimiser(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-4)

    return Lane(
        name=name,
        title=title,
        recipe=recipe,
        overrides=(*overrides, *_PLAIN, "optim.name=momentum", f"optim.lr={lr}", "optim.weight_decay=1e-4"),
        not_random=(),
        mean_loss=mean_loss,
        optimiser=optimiser,
        as_tensors=as_tensors,
        num_compared=num_compared,
        least_updates=least_updates,
        flax_model=flax_model,
    )


LANES = [
    _lane(
        "resnet20-128", "ResNet-20, 32², micro-batch 128", "cnn/quick", 0.005,
        "workload.model.size=20", "workload.data.samples=256", "batch.micro=128", "engine.updates_per_call=5",
        flax_model="resnet",
    ),
    _lane(
        "resnet50-8", "ResNet-50, 224², micro-batch 8", "cnn/resnet50", 0.002,
        "workload.data.source=generated", "workload.data.samples=64", "workload.model.num_classes=10",
        "batch.micro=8", "optim.scale=none", "optim.base_batch=null", "engine.updates_per_call=4",
        # An update takes 1 to 2 s. The plain loop an update short: 1e-2 off.
        num_compared=6, least_updates=12,
    ),
]  # fmt: skip
