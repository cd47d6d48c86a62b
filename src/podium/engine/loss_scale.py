"""The factor on the loss in the backward pass (`precision.loss_scale`). `state.py` keeps it, `update.py` uses it.

An automatic one lives on the device, where every update moves it: the host reads it for records and checkpoints alone.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

#: the automatic loss scale: its first value, the growth factor, the factor after an overflow, updates before it grows
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWS_AFTER = 2.0**16, 2.0, 0.5, 2000
_LEAST_SCALE, _MOST_SCALE = 2.0**-14, 2.0**32


class LossScale:
    """The factor on the loss. An automatic one follows the gradients of every update, the same on every instance."""

    def __init__(self, setting: float | Literal["auto"], device: torch.device | None = None) -> None:
        self.automatic = setting == "auto"
        device = device if self.automatic else None  # on the host, a fixed one is read without waiting
        self._fixed = 0.0 if setting == "auto" else float(setting)
        self._value = torch.full((), _FIRST_SCALE, device=device)
        self._num_good, self._num_skipped = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))

    @property
    def factor(self) -> Tensor | float:
        """The factor of this update: a number, or a scalar on the device that the next update changes."""
        return self._value if self.automatic else self._fixed

    @property
    def value(self) -> float:
        """The factor as a number; the host waits for the device where it is automatic."""
        return float(self._value) if self.automatic else self._fixed

    @value.setter
    def value(self, value: float) -> None:
        self._fixed = value
        self._value.fill_(value)

    @property
    def num_skipped(self) -> int:
        """The updates that were not made; the host waits for the device."""
        return int(self._num_skipped)

    def observe(self, norms: Tensor) -> Tensor:
        """Move an automatic scale by the norms of the gradients of an update; return 1.0 if they have overflowed, so
        that it must not be made, else 0.0. Nothing waits for the device."""
        overflows = ~norms.isfinite().all()
        num_good = torch.where(overflows, 0, self._num_good + 1)
        grows = ~overflows & (num_good % _GROWS_AFTER == 0)
        grown = torch.where(grows, (self._value * _GROWTH).clamp(max=_MOST_SCALE), self._value)
        self._value.copy_(torch.where(overflows, (self._value * _BACKOFF).clamp(min=_LEAST_SCALE), grown))
        self._num_good.copy_(num_good)
        self._num_skipped += overflows
        return overflows.float()

    def record(self) -> dict[str, float]:
        """Return what a metric record holds of an automatic scale."""
        return {"train/loss_scale": self.value, "train/skipped_updates": self.num_skipped} if self.automatic else {}

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": int(self._num_good), "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        if self.automatic:
            self.value = float(state["value"])
            self._num_good.fill_(int(state["num_good"]))
            self._num_skipped.fill_(int(state["num_skipped"]))
