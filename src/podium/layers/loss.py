"""Losses that workloads share."""

import torch.nn.functional as F
from torch import Tensor

from podium.layers.slot import Slot

#: takes (logits, target, ignored); used if the logits are not needed afterwards
CROSS_ENTROPY = Slot()


def cross_entropy_sum(logits: Tensor, target: Tensor, ignored: int = -100, *, keeps: bool) -> Tensor:
    """Sum the cross-entropy over the rows of logits (N, V), except those whose target is `ignored`.

    With `keeps` false the logits must not be used afterwards: their memory may then hold something else.
    """
    if not keeps and (loss := CROSS_ENTROPY(logits, target, ignored)) is not None:
        return loss
    return F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum")


def scaled(loss: Tensor, factor: Tensor | float) -> Tensor:
    """Return a loss times the loss scale, which is a number or on the device."""
    return loss if isinstance(factor, float) and factor == 1 else loss * factor
