"""Averages of weights: while training (owns the `average` section), and over checkpoints for `podium average`.

Both are running means in single precision, a function of the weights alone, and so the same on every instance.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from podium.durations import Duration
from podium.held import held_tensors
from podium.schema import Section

Method = Literal["mean", "exponential"]


class AverageSection(Section):
    """`average: mean` alone says the method. The average is validated beside the weights and saved with them."""

    #: mean: of all weights taken; exponential: average <- decay · average + (1 - decay) · weights
    method: Literal["none"] | Method = "none"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.97
    #: how often weights are taken
    every: Duration = Duration(1, "ep")
    #: from when on
    start: Duration = Duration(0, "up")


class WeightAverage:
    """A running mean of the parameters and floating-point buffers of a model; what is no float is the newest."""

    def __init__(self, method: Method, decay: float) -> None:
        self._method, self._decay = method, decay
        self.num_taken = 0
        self.tensors: dict[str, Tensor] = {}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        self.num_taken += 1
        share = 1 - self._decay if self._method == "exponential" else 1 / self.num_taken
        for name, tensor in weights.items():
            value = tensor.detach()
            if not value.is_floating_point() or self.num_taken == 1:
                copy = value.float() if value.is_floating_point() else value
                self.tensors[name] = copy.clone()
            else:
                self.tensors[name].lerp_(value.float(), share)

    def load(self, tensors: Mapping[str, Tensor], num_taken: int) -> None:
        """Continues from what was saved."""
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.num_taken = num_taken

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """The model has the average for its weights in here."""
        own = {name: tensor.detach().clone() for name, tensor in held_tensors(model).items()}
        _copy_into(model, self.tensors)
        try:
            yield
        finally:
            _copy_into(model, own)


def _copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in held_tensors(model).items():
            tensor.copy_(tensors[name])


def averaged(weights: Iterable[Mapping[str, Tensor]], method: Method, decay: float) -> dict[str, Tensor]:
    """Of several checkpoints, oldest first, in the types of the newest."""
    average = WeightAverage(method, decay)
    newest: Mapping[str, Tensor] = {}
    for newest in weights:
        average.take(newest)
    return {name: average.tensors[name].to(tensor.dtype) for name, tensor in newest.items()}
