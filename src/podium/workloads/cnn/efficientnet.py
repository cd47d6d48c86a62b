"""EfficientNet B0 … B4 (Tan and Le 2019), also with groups of several channels and a smaller expansion.

Padding is symmetric, as usual in torch; the original, in TensorFlow, pads strided convolutions on one side only.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from podium.layers.norm import build_norm
from podium.layers.section import NormSection
from podium.workloads.cnn.model import Network
from podium.workloads.cnn.resnet import classifier, zero_last
from podium.workloads.cnn.section import CnnModel


class _Stage(NamedTuple):
    channels: int
    repeats: int
    stride: int
    kernel: int


_STAGES = (
    _Stage(16, 1, 1, 3), _Stage(24, 2, 2, 3), _Stage(40, 2, 2, 5), _Stage(80, 3, 2, 3), _Stage(112, 3, 1, 5),
    _Stage(192, 4, 2, 5), _Stage(320, 1, 1, 3),
)  # fmt: skip
_STEM, _HEAD = 32, 1280
#: size -> width factor, depth factor, dropout before the classifier
_SCALE = {
    "B0": (1.0, 1.0, 0.2),
    "B1": (1.0, 1.1, 0.2),
    "B2": (1.1, 1.2, 0.3),
    "B3": (1.2, 1.4, 0.3),
    "B4": (1.4, 1.8, 0.4),
}
_DROP_CONNECT = 0.2
_EPS, _MOMENTUM = 1e-3, 0.01


def efficientnet(section: CnnModel, num_classes: int) -> Network:
    assert isinstance(section.size, str)
    width, depth, dropout = _SCALE[section.size]
    drop_connect = _DROP_CONNECT if section.drop_connect is None else section.drop_connect
    channels = _rounded(_STEM * width)
    stem = _convolution(section.norm, 3, channels, 3, 2)
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    total = sum(math.ceil(stage.repeats * depth) for stage in _STAGES)
    for number, stage in enumerate(_STAGES, 1):
        out = _rounded(stage.channels * width)
        for index in range(math.ceil(stage.repeats * depth)):
            blocks[f"block{number}_{index + 1}"] = InvertedBlock(
                section.norm,
                channels,
                out,
                kernel=stage.kernel,
                stride=1 if index else stage.stride,
                expand_ratio=1 if number == 1 else section.expand_ratio,
                group_dim=section.group_dim,
                drop=drop_connect * len(blocks) / total,
            )
            channels = out
    last = _rounded(_HEAD * width)
    dropout = dropout if section.dropout is None else section.dropout
    head = nn.Sequential(*_convolution(section.norm, channels, last, 1, 1), *classifier(last, num_classes, dropout))
    network = Network(stem, nn.Sequential(blocks), head)
    _initialise(network, zero_init=section.zero_init)
    return network


class InvertedBlock(nn.Module):
    """An inverted bottleneck: expand, convolve in groups, excite, project; with a shortcut if shapes allow it."""

    def __init__(
        self,
        norm: NormSection,
        channels: int,
        out: int,
        *,
        kernel: int,
        stride: int,
        expand_ratio: int,
        group_dim: int,
        drop: float,
    ) -> None:
        super().__init__()
        wide = channels * expand_ratio
        wide += -wide % group_dim
        layers: list[nn.Module] = []
        if wide != channels:
            layers += _convolution(norm, channels, wide, 1, 1)
        layers += _convolution(norm, wide, wide, kernel, stride, groups=wide // group_dim)
        layers += [Excitation(wide, max(1, channels // 4))]
        layers += [nn.Conv2d(wide, out, 1, bias=False), build_norm(norm, out, 2, eps=_EPS, momentum=_MOMENTUM)]
        self.branch = nn.Sequential(*layers)
        self.shortcut = stride == 1 and channels == out
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if not self.shortcut:
            return y
        if self.training and self.drop:
            kept = torch.rand(len(y), 1, 1, 1, device=y.device) >= self.drop
            y = y * (kept / (1 - self.drop)).to(y.dtype)
        return x + y


class Excitation(nn.Module):
    """Squeeze and excitation: weights each channel by a function of the channel means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


def _convolution(
    norm: NormSection, channels: int, out: int, kernel: int, stride: int, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        build_norm(norm, out, 2, eps=_EPS, momentum=_MOMENTUM),
        nn.SiLU(inplace=True),
    )


def _rounded(channels: float) -> int:
    """Round to the nearest multiple of 8, but not to more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _initialise(network: Network, *, zero_init: bool) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            reach = module.out_features**-0.5
            nn.init.uniform_(module.weight, -reach, reach)
            nn.init.zeros_(module.bias)
        elif zero_init and isinstance(module, InvertedBlock):
            zero_last(module.branch)
