"""Losses that workloads share."""

import torch.nn.functional as F
from torch import Tensor

from podium.engine.cross_entropy import CrossEntropy, fits


def cross_entropy_sum(logits: Tensor, target: Tensor, ignored: int = -100, *, keeps: bool) -> Tensor:
    """Summed over the rows of logits (N, V), but for those whose target is `ignored`.

    With `keeps` false nobody may look at the logits afterwards: their memory may hold something else then.
    """
    if keeps or not fits(logits):
        return F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum")
    loss: Tensor = CrossEntropy.apply(logits, target, ignored)
    return loss
