"""The loop of the tutorials after PyTorch's own tuning guides: the fused optimiser, channels-last weights and images,
gradients set to None, and jemalloc as the guides configure it, one thread for each core."""

from typing import Any

import torch
from torch import Tensor, nn

from bench.race.heat import Heat, Outcome, Stopwatch


def fused(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimiser of the same kind, parameters and values, whose steps are fused."""
    groups = [group | {"foreach": None, "fused": True} for group in optimiser.param_groups]
    kind: Any = type(optimiser)
    return kind(groups, fused=True)


def channels_last(model: nn.Module) -> bool:
    """Lay out the weights of two-dimensional convolutions as the guides advise; return whether there are any."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return True


def laid_out(batch: list[Tensor], images_too: bool) -> list[Tensor]:
    if not images_too:
        return batch
    return [part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part for part in batch]


def race(heat: Heat, compile: bool = False) -> Outcome:
    task, watch = heat.task(), Stopwatch(heat)
    images_too = channels_last(task.model)
    optimiser = fused(task.optimiser)
    model: Any = torch.compile(task.model) if compile else task.model
    for batch in task.loader():
        optimiser.zero_grad(set_to_none=True)
        loss = task.mean_loss(model, *laid_out(batch, images_too))
        loss.backward()
        optimiser.step()
        watch.update_done()
    return Outcome(watch.seconds, task.model)
