"""The full neuron inverter at micro-batch 192: convolutions and wide linear layers, mostly arithmetic."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.race.lane import Lane


def mean_loss(model: nn.Module, frames: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(frames), target)


def optimiser(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=5e-5)


LANES = [
    Lane(
        name="neuron-192",
        title="neuron full, micro-batch 192",
        recipe="neuron/full",
        # Records come more often than in the recipe, whose 30 updates take longer than a stretch.
        overrides=("workload.data.samples=10000", "batch.micro=192", "optim.lr=5e-5", "engine.updates_per_call=5"),
        not_random=("workload.model.dropout=0",),
        mean_loss=mean_loss,
        optimiser=optimiser,
        num_compared=30,
        flax_model="neuron",
        flattened={"norm": (180, 24), "linear1.0": (180, 24)},
    )
]
