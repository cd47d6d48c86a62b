"""The inverter: predicts the parameters of a cell from its voltages. A plain single-device module.

The published variants are recipes. Shapes of the full model, for n samples:

    frames (n, 1600, 4) -> (n, 4, 1600) -> (n, 30, 399) -> (n, 90, 99) -> (n, 180, 24) -> (n, 4320) -> … -> (n, 15)
"""

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.errors import UserError
from podium.layers.norm import build_norm
from podium.workloads.neuron.section import NeuronModel


class Standardise(nn.Module):
    """(v - mean) / std, by probe. Part of the model, so that checkpoints include the statistics."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: NDArray[np.float32], std: NDArray[np.float32]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean.copy()))
        self.register_buffer("scale", torch.from_numpy(1 / std))

    def forward(self, frames: Tensor) -> Tensor:
        return (frames - self.mean) * self.scale


class ChannelsFirst(nn.Module):
    """Maps (n, bins, probes), as stored, to (n, probes, bins), as convolutions need it."""

    def forward(self, frames: Tensor) -> Tensor:
        return frames.transpose(1, 2)


class Reshaped(nn.Module):
    """Maps to the same shape by reading the numbers on in the order in which they are stored, as the published trainer
    does: every channel is a quarter of the trace, and has the probes in turn."""

    def forward(self, frames: Tensor) -> Tensor:
        n, bins, probes = frames.shape
        return frames.reshape(n, probes, bins)


class LastState(nn.Module):
    """Maps (n, bins, probes), with `patch` bins per step, to the LSTM's last hidden state (n, hidden)."""

    def __init__(self, num_probes: int, hidden: int, layers: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.lstm = nn.LSTM(num_probes * patch, hidden, layers, batch_first=True)

    def forward(self, frames: Tensor) -> Tensor:
        n, bins, probes = frames.shape
        _, (hidden, _) = self.lstm(frames.reshape(n, bins // self.patch, self.patch * probes))
        return hidden[-1]


def build_network(
    section: NeuronModel,
    num_bins: int,
    num_probes: int,
    num_outputs: int,
    statistics: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> nn.Sequential:
    """Build the blocks in order, named as in the device allocation of a pipeline.

    `statistics` are mean and standard deviation by probe, for `standardise`.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    if section.standardise:
        assert statistics is not None
        blocks["input"] = Standardise(*statistics)
    if section.kind == "cnn":
        num_features = _add_convolutions(blocks, section, num_bins, num_probes)
    else:
        num_features = _add_lstm(blocks, section, num_bins, num_probes)
    if section.norm.kind != "none":
        blocks["norm"] = build_norm(section.norm, num_features, dims=1)
    for number, width in enumerate(section.linear, start=1):
        blocks[f"linear{number}"] = nn.Sequential(
            nn.Linear(num_features, width), nn.ReLU(), nn.Dropout(section.dropout)
        )
        num_features = width
    blocks["output"] = nn.Linear(num_features, num_outputs)
    return nn.Sequential(blocks)


def _add_convolutions(blocks: dict[str, nn.Module], section: NeuronModel, num_bins: int, num_probes: int) -> int:
    channels, bins = num_probes, num_bins
    channels_first = ChannelsFirst() if section.frames == "transpose" else Reshaped()
    shape = zip(section.filters, section.kernels, section.pools, strict=True)
    for number, (filters, kernel, pool) in enumerate(shape, start=1):
        # ReLU after the pool: the same values at a fraction of the cost.
        block = nn.Sequential(nn.Conv1d(channels, filters, kernel), nn.MaxPool1d(pool), nn.ReLU())
        blocks[f"conv{number}"] = block if number > 1 else nn.Sequential(channels_first, *block)
        left = (bins - kernel + 1) // pool
        if left < 1:
            raise UserError(
                f"workload.model: block {number} (kernel {kernel}, pool {pool}) does not fit the {bins} time bins "
                f"that reach it"
            )
        channels, bins = filters, left
    blocks["flatten"] = nn.Flatten()
    return channels * bins


def _add_lstm(blocks: dict[str, nn.Module], section: NeuronModel, num_bins: int, num_probes: int) -> int:
    if num_bins % section.lstm_patch:
        raise UserError(
            f"workload.model.lstm_patch = {section.lstm_patch}: expected a divisor of the {num_bins} time bins"
        )
    blocks["lstm"] = LastState(num_probes, section.lstm_hidden, section.lstm_layers, section.lstm_patch)
    return section.lstm_hidden
