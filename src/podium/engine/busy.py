"""How many of its threads a replica keeps busy. Called by `prepare.py`."""

import warnings

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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
    """Of one sample, in matrix products and convolutions, by a trial of two."""
    was_training = model.training
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in workload.example(2).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # told whenever the next setting is touched
        # A library's recurrent layer would count as nothing; torch's own is made of matrix products.
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            workload.loss(model.eval(), batch)
    model.train(was_training)
    return _BOTH_PASSES * counter.get_total_flops() // 2
