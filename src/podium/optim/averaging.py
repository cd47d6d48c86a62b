"""Averages of weights: during training (the `average` section), and over checkpoints for `podium average`.

Both are running means in single precision that depend on the weights only, and are thus the same on every instance.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from podium.recipe.sections.average import Method


class WeightAverage:
    """A running mean of a model's parameters and floating-point buffers; other buffers keep the newest value."""

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
        """Continue from a saved average."""
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.num_taken = num_taken

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the average as its weights inside the `with` block."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in self.tensors}
        _copy_into(model, self.tensors)
        try:
            yield
        finally:
            _copy_into(model, own)


def _copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in tensors:
                tensor.copy_(tensors[name])


def averaged(weights: Iterable[Mapping[str, Tensor]], method: Method, decay: float) -> dict[str, Tensor]:
    """Return the average of several checkpoints, oldest first, in the types of the newest."""
    average = WeightAverage(method, decay)
    newest: Mapping[str, Tensor] = {}
    for newest in weights:
        average.take(newest)
    return {name: average.tensors[name].to(tensor.dtype) for name, tensor in newest.items()}
