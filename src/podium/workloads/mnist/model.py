"""The network: two convolutions, two linear layers. A plain single-device module.

Shapes with the defaults: (n, 1, 28, 28) -> (n, 32, 13, 13) -> (n, 64, 5, 5) -> (n, 128) -> (n, 10).
"""

from torch import Tensor, nn

from podium.workloads.mnist.section import MnistModel

_IMAGE_SIZE = 28


class Network(nn.Module):
    """A sequence of four blocks, named as in the device allocation of a pipeline."""

    def __init__(self, section: MnistModel) -> None:
        super().__init__()
        first, second = section.filters
        # Each block's 3×3 kernel reduces the side by 2; pooling then halves it, rounding down.
        size = ((_IMAGE_SIZE - 2) // 2 - 2) // 2
        self.conv1 = nn.Sequential(nn.Conv2d(1, first, 3), nn.MaxPool2d(2), nn.ReLU())
        self.conv2 = nn.Sequential(nn.Conv2d(first, second, 3), nn.MaxPool2d(2), nn.ReLU())
        self.hidden = nn.Sequential(
            nn.Flatten(), nn.Linear(second * size * size, section.hidden), nn.ReLU(), nn.Dropout(section.dropout)
        )
        self.output = nn.Sequential(nn.Linear(section.hidden, section.num_classes))
        if section.output == "softmax":
            self.output.append(nn.Softmax(dim=1))

    def stages(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks in order; running them in sequence is the forward pass."""
        return list(self.named_children())

    def forward(self, image: Tensor) -> Tensor:
        return self.output(self.hidden(self.conv2(self.conv1(image))))
