"""The CNN family: builds the network that a recipe names. The networks are in `resnet` and `efficientnet`.

Every network is a sequence of blocks, `stem`, then the blocks, then `head`, between which a pipeline may split and at
which activations may be recomputed.
"""

from torch import Tensor, nn

from podium.workloads.cnn.section import CnnModel


class Network(nn.Module):
    """A sequence of blocks."""

    def __init__(self, stem: nn.Module, blocks: nn.Sequential, head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = blocks
        self.head = head

    def stages(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks in order; running them in sequence is the forward pass."""
        return [("stem", self.stem), *self.blocks.named_children(), ("head", self.head)]

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)))


def build_network(section: CnnModel, num_classes: int) -> Network:
    """Build the network for images (n, 3, height, width); weights come from torch's default generator."""
    if section.name == "efficientnet":
        from podium.workloads.cnn.efficientnet import efficientnet

        return efficientnet(section, num_classes)
    from podium.workloads.cnn.resnet import resnet

    return resnet(section, num_classes)
