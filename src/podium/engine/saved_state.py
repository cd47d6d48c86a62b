"""The state in a checkpoint, checked before it is used: its checksum shows that it is whole, not who wrote it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from podium.errors import UserError

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Means = dict[str, float]
_Link = Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Chain(_Saved):
    update: _Count = 0
    before: _Link = ""
    link: _Link = ""
    each: Annotated[str, Field(pattern="^[0-9a-f]*$")] = ""


class _Progress(_Saved):
    model_config = ConfigDict(extra="allow")

    update: _Count
    train_last: _Means
    train_best: _Means
    valid_last: _Means
    valid_best: _Means
    best_update: _Count | None
    # Checkpoints of earlier versions lack these.
    best_value: float | None = None
    stop_value: float | None = None
    num_missed: _Count = 0
    stopped_early: bool = False
    average_last: _Means
    num_averaged: _Count
    chain: _Chain = _Chain()
    pending: dict[str, Sequence[Annotated[Sequence[float], Field(min_length=2, max_length=2)]]]


class _LossScale(_Saved):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    num_good: _Count
    num_skipped: _Count


class _State(_Saved):
    model_config = ConfigDict(extra="allow")

    progress: _Progress
    schedule: dict[str, float | None]
    loss_scale: _LossScale | None = None
    recipe: dict[str, Any] = {}
    seconds: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


def check_saved(saved: Mapping[str, Any]) -> None:
    """Raise UserError unless this is what `TrainState.state` returned, with what the training adds to it."""
    try:
        _State.model_validate(dict(saved))
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors(include_url=False, include_input=False)[0]["loc"])[:80]
        raise damaged_state(f"{key} does not hold what it should") from None
    if "update" in saved and saved["update"] != saved["progress"]["update"]:
        raise damaged_state(f"it is of update {saved['update']}, but says {saved['progress']['update']} inside")


def check_average(average: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Raise UserError unless averaged weights are of this model."""
    for name, tensor in average.items():
        if name not in model or model[name].shape != tensor.shape:
            raise UserError(f"the averaged weights of the checkpoint do not fit the model of the recipe: {name[:80]}")


def damaged_state(reason: str) -> UserError:
    """Return the error to raise where the state of a checkpoint is not what was saved."""
    return UserError(
        f"the state of the checkpoint is damaged: {reason}; go back to an earlier one with `podium resume RUN "
        "--checkpoint UPDATE`"
    )
