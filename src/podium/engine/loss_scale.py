"""The factor on the loss in the backward pass (`precision.loss_scale`). `state.py` keeps it, `update.py` uses it."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

#: the automatic loss scale: its first value, the growth factor, the factor after an overflow, updates before it grows
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWS_AFTER = 2.0**16, 2.0, 0.5, 2000
_LEAST_SCALE, _MOST_SCALE = 2.0**-14, 2.0**32


class LossScale:
    """The factor on the loss. An automatic one follows the gradients of every update, the same on every instance."""

    def __init__(self, setting: float | Literal["auto"]) -> None:
        self.automatic = setting == "auto"
        self.value = _FIRST_SCALE if setting == "auto" else float(setting)
        self.num_skipped = 0
        self._num_good = 0

    def accepts(self, norms: Tensor) -> bool:
        """Return whether gradients of these norms may be used for an update; if not, they have overflowed, and the
        scale is lowered for the next ones."""
        if not self.automatic:
            return True
        # The host waits for the device here, as it must know whether to make the update.
        if bool(norms.isfinite().all()):
            self._num_good += 1
            if self._num_good % _GROWS_AFTER == 0:
                self.value = min(self.value * _GROWTH, _MOST_SCALE)
            return True
        self._num_good = 0
        self.num_skipped += 1
        self.value = max(self.value * _BACKOFF, _LEAST_SCALE)
        return False

    def record(self) -> dict[str, float]:
        """Return what a metric record holds of an automatic scale."""
        return {"train/loss_scale": self.value, "train/skipped_updates": self.num_skipped} if self.automatic else {}

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        if self.automatic:
            self.value = float(state["value"])
            self._num_good, self.num_skipped = int(state["num_good"]), int(state["num_skipped"])
