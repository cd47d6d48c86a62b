"""The network: two convolutions, two linear layers. A plain single-device module.

Shapes with the defaults: (n, 1, 28, 28) -> (n, 32, 13, 13) -> (n, 64, 5, 5) -> (n, 128) -> (n, 10).
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from podium.schema import Section

_IMAGE_SIZE = 28


class MnistModel(Section):
    """`workload.model` of mnist."""

    #: filters of the two convolutions
    filters: tuple[PositiveInt, PositiveInt] = (32, 64)
    #: width of the hidden linear layer
    hidden: PositiveInt = 128
    #: share of hidden values zeroed in training
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    #: labels are bytes
    num_classes: Annotated[int, Field(ge=2, le=256)] = 10
    #: softmax: probabilities go into the cross-entropy (which applies a softmax of its own), as in the published model
    output: Literal["logits", "softmax"] = "logits"


class Network(nn.Module):
    """Four blocks in a row, named as a pipeline's device allocation prints them."""

    def __init__(self, section: MnistModel) -> None:
        super().__init__()
        first, second = section.filters
        # Each block takes 2 by its 3×3 kernel and halves the rest, rounding down.
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
        """The blocks in order; running them one after another is the forward pass."""
        return list(self.named_children())

    def forward(self, image: Tensor) -> Tensor:
        return self.output(self.hidden(self.conv2(self.conv1(image))))
