"""How many of its threads a replica keeps busy. Called by `prepare.py`."""

import torch
from torch import Tensor, nn

from podium.workloads.base import Workload

#: Work of a micro-batch for each thread. Below it the threads wait for one another longer than they save, and all wait
#: when one is held up: mnist at micro-batch 8 (126 MFLOP) was 1.1 to 1.4 times as fast on one of two threads,
#: neuron/quick (299 MFLOP) 1.2 to 1.5 times as fast on both.
_LEAST_FLOPS = 100_000_000
_BOTH_PASSES = 3  # a backward pass is about twice the forward pass


def busy_threads(threads: int, workload: Workload, model: nn.Module, micro_batch: int) -> int:
    """How many of a replica's `threads` its micro-batches are large enough for. Depends on nothing else, as the number
    is part of the numerics."""
    most = threads
    if threads > 1:
        # Every parameter is used at least once, which mostly answers it, and large models need no trial.
        flops = 2 * _BOTH_PASSES * micro_batch * sum(param.numel() for param in model.parameters())
        if flops < threads * _LEAST_FLOPS:
            flops = max(flops, _flops(workload, model) * micro_batch)
        most = max(1, flops // _LEAST_FLOPS)
    return min(threads, most)


def _flops(workload: Workload, model: nn.Module) -> int:
    """About those of one sample in layers with weights, by a trial of two. torch's counter misses recurrent ones."""
    num_products = 0

    def count(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        nonlocal num_products
        weights = [param for param in module.parameters(recurse=False) if param.dim() > 1]
        if weights and not isinstance(module, nn.Embedding):
            values = output[0] if isinstance(output, tuple) else output
            num_out = module.hidden_size if isinstance(module, nn.RNNBase) else len(weights[0])
            num_products += values.numel() // num_out * sum(weight.numel() for weight in weights)

    was_training, num_samples = model.training, 2
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in workload.example(num_samples).items()}
    hooks = [module.register_forward_hook(count) for module in model.modules()]
    try:
        with torch.no_grad():
            workload.loss(model.eval(), batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return 2 * _BOTH_PASSES * num_products // num_samples
