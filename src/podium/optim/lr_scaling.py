"""The learning rate of a recipe at its global batch.

`OptimSection` refuses contradictions when the recipe is read, `train.py` asks for the scaled rate.
"""

from math import sqrt

from podium.errors import UserError
from podium.recipe.sections.optim import Scale, contradiction


def scaled_lr(
    *,
    lr: float | None,
    lr_exponent: int | None = None,
    scale: Scale = "none",
    base_batch: int | None,
    global_batch: int,
) -> float:
    """Return `lr` times 1, √ratio or ratio = global_batch / base_batch; or 2^lr_exponent per sample of the batch."""
    if problem := contradiction(lr, lr_exponent, scale, base_batch):
        raise UserError(problem)
    if lr_exponent is not None:
        return 2.0**lr_exponent * global_batch
    assert lr is not None
    if scale == "none":
        return lr
    assert base_batch is not None
    # multiplied before dividing, so that linear scaling by an integer ratio is exact
    return lr * global_batch / base_batch if scale == "linear" else lr * sqrt(global_batch / base_batch)
