"""How many of its threads a replica keeps busy. Called by `training/build.py`."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from podium.contract import Workload

#: Least work of a micro-batch for each thread. Below it the threads lose more by waiting for one another than they
#: save, and all wait when one is delayed: mnist at micro-batch 8 (126 MFLOP) was 1.1 to 1.4 times as fast on one of two
#: threads, neuron/quick (299 MFLOP) 1.2 to 1.5 times as fast on both.
_LEAST_FLOPS = 100_000_000
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BOTH_PASSES = 3  # a backward pass is about twice the forward pass


def busy_threads(threads: int, workload: Workload, model: nn.Module, micro_batch: int) -> int:
    """Return how many of a replica's `threads` its micro-batches are large enough for.

    It depends on nothing else, since the number is part of the numerics.
    """
    most = threads
    if threads > 1:
        # Every parameter is used at least once, which usually settles it; large models then need no trial.
        flops = 2 * _BOTH_PASSES * micro_batch * sum(param.numel() for param in model.parameters())
        if flops < threads * _LEAST_FLOPS:
            flops = max(flops, _flops(workload, model) * micro_batch)
        most = max(1, flops // _LEAST_FLOPS)
    return min(threads, most)


def _flops(workload: Workload, model: nn.Module) -> int:
    """Estimate the FLOPs of one sample in layers with weights, by a trial with two samples."""
    was_training, num_samples = model.training, 2
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in workload.example(num_samples).items()}
    try:
        with torch.no_grad(), Products(model) as products:
            workload.loss(model.eval(), batch)
    finally:
        model.train(was_training)
    return 2 * _BOTH_PASSES * products.count // num_samples


class Products:
    """A counter of multiplications in layers with weights, forward, while it is entered.

    torch's own counter misses recurrent layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self.count = 0

    def __enter__(self) -> Self:
        self._hooks = [module.register_forward_hook(self._add) for module in self._model.modules()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        weights = [param for param in module.parameters(recurse=False) if param.dim() > 1]
        if weights and not isinstance(module, nn.Embedding):
            values = output[0] if isinstance(output, tuple) else output
            num_out = module.hidden_size if isinstance(module, nn.RNNBase) else len(weights[0])
            if isinstance(module, _TRANSPOSED):  # every input value is multiplied with every weight of its channel
                values = inputs[0]
            self.count += values.numel() // num_out * sum(weight.numel() for weight in weights)
