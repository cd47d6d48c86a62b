"""ResNet and ResNeXt (He et al. 2015, Xie et al. 2016), for images of ImageNet and CIFAR size.

ImageNet  7×7 stem and max-pool, then four stages of blocks with 64, 128, 256, 512 channels; size 50 and above
          with bottlenecks, whose middle convolution has the stride (as is usual since 2017)
CIFAR     3×3 stem, three stages with 16, 32, 64 channels; 6n + 2 layers; shortcuts without parameters

`width` sets the channels of the first stage, and all others in proportion.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from podium.layers.norm import build_norm
from podium.layers.residual import ResidualBlock
from podium.layers.section import NormSection
from podium.workloads.cnn.model import Network
from podium.workloads.cnn.section import CnnModel

#: size -> blocks in each stage, and whether they are bottlenecks
_STAGES: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
_EXPANSION = 4
#: resnext: groups, and channels of each group in the first stage
_RESNEXT = {50: (32, 4), 101: (32, 8)}


def resnet(section: CnnModel, num_classes: int) -> Network:
    size = section.size
    assert isinstance(size, int)
    network = _imagenet(section, size, num_classes) if size in _STAGES else _cifar(section, size, num_classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if section.zero_init and isinstance(module, ResidualBlock):
            zero_last(module.branch)
    return network


def _imagenet(section: CnnModel, size: int, num_classes: int) -> Network:
    counts, bottleneck = _STAGES[size]
    groups, group_width = _RESNEXT[size] if section.name == "resnext" else (1, section.width or 64)
    norm, first = section.norm, section.width or 64
    stem = nn.Sequential(
        nn.Conv2d(3, first, 7, 2, 3, bias=False),
        build_norm(norm, first, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    channels = first
    for stage, count in enumerate(counts):
        width = first << stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            if bottleneck:
                middle, out = (groups * group_width) << stage, width * _EXPANSION
                branch = _bottleneck(norm, channels, middle, out, stride, groups)
            else:
                out = width
                branch = _basic(norm, channels, out, stride)
            shortcut: nn.Module = nn.Identity()
            if stride > 1 or channels != out:
                shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), build_norm(norm, out, 2))
            blocks[f"block{stage + 1}_{index + 1}"] = ResidualBlock(branch, shortcut)
            channels = out
    return Network(stem, nn.Sequential(blocks), classifier(channels, num_classes, section.dropout or 0.0))


def _cifar(section: CnnModel, size: int, num_classes: int) -> Network:
    norm, first = section.norm, section.width or 16
    stem = nn.Sequential(nn.Conv2d(3, first, 3, 1, 1, bias=False), build_norm(norm, first, 2), nn.ReLU(inplace=True))
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    channels = first
    for stage in range(3):
        out = first << stage
        for index in range((size - 2) // 6):
            stride = 2 if stage and not index else 1
            shortcut = PaddedShortcut(stride, out - channels) if stride > 1 else nn.Identity()
            block = ResidualBlock(_basic(norm, channels, out, stride), shortcut)
            blocks[f"block{stage + 1}_{index + 1}"] = block
            channels = out
    return Network(stem, nn.Sequential(blocks), classifier(channels, num_classes, section.dropout or 0.0))


def _basic(norm: NormSection, channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride, 1, bias=False),
        build_norm(norm, out, 2),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, 1, 1, bias=False),
        build_norm(norm, out, 2),
    )


def _bottleneck(norm: NormSection, channels: int, middle: int, out: int, stride: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, middle, 1, bias=False),
        build_norm(norm, middle, 2),
        nn.ReLU(inplace=True),
        nn.Conv2d(middle, middle, 3, stride, 1, groups=groups, bias=False),
        build_norm(norm, middle, 2),
        nn.ReLU(inplace=True),
        nn.Conv2d(middle, out, 1, bias=False),
        build_norm(norm, out, 2),
    )


def zero_last(branch: nn.Sequential) -> None:
    """Set the norm at the end of a branch to zero, if there is one."""
    if isinstance(weight := getattr(branch[-1], "weight", None), nn.Parameter):
        nn.init.zeros_(weight)


def classifier(channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    """Build the head: the mean over the image, then one linear layer."""
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))


class PaddedShortcut(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and zeros for the additional channels."""

    def __init__(self, stride: int, num_new: int) -> None:
        super().__init__()
        self.stride, self.num_new = stride, num_new

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
