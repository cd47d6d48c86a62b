"""The published U-Net on volumes of 64³, full width: three-dimensional convolutions, 117 million parameters.

Fields are random and few, so that the loss falls within a few updates, which take seconds each.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.race.lane import Lane

_LR = 2e-4


def mean_loss(model: nn.Module, nbody: Tensor, hydro: Tensor) -> Tensor:
    return F.l1_loss(model(nbody), hydro)


def optimiser(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=_LR)


LANES = [
    Lane(
        name="cosmology-2",
        title="U-Net, 64³, micro-batch 2",
        recipe="cosmology/base",
        overrides=(
            "workload.data.source=generated", "workload.data.samples=8", "workload.data.valid_samples=2",
            "batch.global=null", "batch.micro=2", "valid.micro=2", f"optim.lr={_LR}", "optim.scale=none",
            "engine.updates_per_call=4",
        ),
        not_random=(),
        mean_loss=mean_loss,
        optimiser=optimiser,
        # An update takes seconds. The plain loop after 6: 6e-5 off with weights 1e-6 larger, 8e-3 an update short.
        num_compared=6,
        least_updates=12,
    )
]  # fmt: skip
