"""The CNN family: which network a recipe names. Owns `workload.model`; the networks are in `resnet` and `efficientnet`.

Every network is a row of blocks, `stem`, then the blocks, then `head`: what a pipeline may cut between, and where
activations may be dropped and computed again.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from podium.layers.norm import NormSection
from podium.schema import Section

Share = Annotated[float, Field(ge=0.0, lt=1.0)]

#: model -> its sizes: for images as small as CIFAR's, and for those of ImageNet
SIZES: dict[str, tuple[int | str, ...]] = {
    "resnet": (8, 14, 20, 32, 44, 56, 18, 34, 50, 101, 152),
    "resnext": (50, 101),
    "efficientnet": ("B0", "B1", "B2", "B3", "B4"),
}


class CnnModel(Section):
    """`workload.model` of cnn."""

    name: Literal["resnet", "resnext", "efficientnet"] = "resnet"
    #: resnet: 8, 14, 20, 32, 44, 56 (CIFAR) or 18, 34, 50, 101, 152; resnext: 50, 101; efficientnet: B0 … B4
    size: int | str = 20
    #: null: as many as the data has
    num_classes: PositiveInt | None = None
    norm: NormSection = NormSection()
    #: the last norm of every residual block begins at zero, so that the block begins as its shortcut
    zero_init: bool = False
    #: share of the features zeroed before the classifier; null: 0, with efficientnet 0.2 … 0.4 by size
    dropout: Share | None = None
    #: efficientnet: share of blocks left out, sample by sample, growing with depth; null: 0.2
    drop_connect: Share | None = None
    #: efficientnet: channels in each group of the middle convolutions; 1: depthwise, as published
    group_dim: PositiveInt = 1
    #: efficientnet: how much wider a block is in the middle than at its ends
    expand_ratio: PositiveInt = 6

    @model_validator(mode="after")
    def _known(self) -> Self:
        sizes = SIZES[self.name]
        if isinstance(self.size, str):
            object.__setattr__(self, "size", self.size.upper())
        if self.size not in sizes:
            raise ValueError(f"size = {self.size} is none of {self.name}: expected one of {', '.join(map(str, sizes))}")
        if self.name != "efficientnet":
            fields = type(self).model_fields
            for key in ("drop_connect", "group_dim", "expand_ratio"):
                if getattr(self, key) != fields[key].default:
                    raise ValueError(f"{key} means nothing to {self.name}: leave it out")
        return self


class Network(nn.Module):
    """Blocks in a row."""

    def __init__(self, stem: nn.Module, blocks: nn.Sequential, head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = blocks
        self.head = head

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The blocks in order; running them one after another is the forward pass."""
        return [("stem", self.stem), *self.blocks.named_children(), ("head", self.head)]

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)))


def build_network(section: CnnModel, num_classes: int) -> Network:
    """Of images (n, 3, height, width); weights from torch's default generator."""
    if section.name == "efficientnet":
        from podium.workloads.cnn.efficientnet import efficientnet

        return efficientnet(section, num_classes)
    from podium.workloads.cnn.resnet import resnet

    return resnet(section, num_classes)
