"""The learning rate a recipe means at its global batch. Owns the rules; the keys are part of the `optim` section.

`optimisers.OptimSection` refuses contradictions when the recipe is read, `train.py` asks for the scaled rate.
"""

from math import sqrt
from typing import Literal

from podium.errors import UserError

Scale = Literal["none", "sqrt", "linear"]


def contradiction(lr: float | None, lr_exponent: int | None, scale: Scale, base_batch: int | None) -> str | None:
    """One sentence about what cannot be meant, or None."""
    if lr is None and lr_exponent is None:
        return "a learning rate is missing: give optim.lr or optim.lr_exponent"
    if lr is not None and lr_exponent is not None:
        return "optim.lr and optim.lr_exponent contradict each other: give one and set the other to null"
    if lr_exponent is not None and scale != "none":
        return f"optim.lr_exponent already grows with the global batch: drop optim.scale={scale}"
    if scale != "none" and base_batch is None:
        return f"optim.scale={scale} needs optim.base_batch, the global batch that optim.lr was found at"
    return None


def scaled_lr(
    *,
    lr: float | None,
    lr_exponent: int | None = None,
    scale: Scale = "none",
    base_batch: int | None,
    global_batch: int,
) -> float:
    """`lr` times 1, the root, or the whole of global_batch / base_batch; or 2^lr_exponent per sample of the batch."""
    if problem := contradiction(lr, lr_exponent, scale, base_batch):
        raise UserError(problem)
    if lr_exponent is not None:
        return 2.0**lr_exponent * global_batch
    assert lr is not None
    if scale == "none":
        return lr
    assert base_batch is not None
    # multiplied before divided, so that a linear scale by a whole ratio is exact
    return lr * global_batch / base_batch if scale == "linear" else lr * sqrt(global_batch / base_batch)
