"""One weight update of the local replicas. Owns the `engine` section; called by `train.py` for every update.

    for each local replica:
        for each of its micro-batches: seed by place, forward, backward of the loss *sum*
        push its gradients (and buffers) onto the tree
    one optimiser step on (sum of gradients) / (sum of counts)

The host never looks at a device value in here; `collect()` does, once per call of many updates.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from podium.batch import BatchSection
from podium.engine.randomness import seed_torch
from podium.engine.reduce import Tensors, TreeSum
from podium.optim.optimisers import Optimiser, clip_divisor, step
from podium.schema import Section
from podium.workloads.base import Loss, Workload


class EngineSection(Section):
    """How updates are carried out on the machine; none of it changes what is learnt."""

    #: the host looks at losses only every so many updates
    updates_per_call: PositiveInt = 50
    #: threads per replica; part of the numerics. `auto` is cores // replicas, at least 1
    threads: PositiveInt | Literal["auto"] = "auto"
    #: blocks of samples made ready ahead of time
    prefetch: NonNegativeInt = 2
    device: str = "auto"


@dataclass
class Sums:
    """(sum, count) of the loss and metrics over updates, as the parts they came in.

    `math.fsum` adds the parts without rounding in between, so their order and grouping do not matter.
    """

    parts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, name: str, total: float, count: int) -> None:
        self.parts.setdefault(name, []).append((total, count))

    def extend(self, other: "Sums") -> None:
        for name, parts in other.parts.items():
            self.parts.setdefault(name, []).extend(parts)

    def means(self) -> dict[str, float]:
        return {
            name: _fsum(total for total, _ in parts) / max(1, sum(count for _, count in parts))
            for name, parts in self.parts.items()
        }


def _fsum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or beyond the range of a float
        return math.nan


class PendingLosses:
    """Losses still on the device, waiting for the host to look at them all at once."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._labels: list[tuple[str, int]] = []

    def add(self, loss: Loss) -> None:
        self._values.append(loss.sum.detach())
        self._labels.append(("loss", loss.count))
        for name, (total, count) in loss.metrics.items():
            self._values.append(total.detach())
            self._labels.append((name, count))

    def collect(self) -> Sums:
        """Waits for the device and hands the values over."""
        sums = Sums()
        if self._values:
            # Sums of other types than the loss (a count of hits, say) join it in float64, which holds them all.
            alike = all(value.dtype == self._values[0].dtype for value in self._values)
            values = torch.stack(self._values if alike else [value.double() for value in self._values]).tolist()
            for (name, count), value in zip(self._labels, values, strict=True):
                sums.add(name, value, count)
            self._values, self._labels = [], []
        return sums


class Engine:
    """Carries the replicas of this instance through weight updates."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        optimiser: Optimiser,
        batch: BatchSection,
        replicas: range,
        seed: int,
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self._workload = workload
        self._optimiser = optimiser
        self._clip_norm = clip_norm
        self._num_accumulation = batch.num_accumulation
        self._replicas = replicas
        self._seed = seed
        self._params = [p for group in optimiser.param_groups for p in group["params"]]
        self._device = self._params[0].device
        self._buffers = list(model.buffers())
        self._pending = PendingLosses()

    def update(self, update: int, samples: Mapping[str, Tensor], lr: float) -> None:
        """Update number `update` (0-based); `samples`: (local replicas, accumulation, micro-batch, …)."""
        if len(self._replicas) == 1:
            count = self._replica(update, self._replicas[0], {name: rows[0] for name, rows in samples.items()})
        else:
            count = self._replicas_in_turn(update, samples)
        divisor: Tensor | float = count
        if self._clip_norm is not None:
            grads = [param.grad for param in self._params if param.grad is not None]
            divisor, _ = clip_divisor(grads, count, self._clip_norm)
        step(self._optimiser, divisor, lr)
        for param in self._params:
            param.grad = None

    def collect(self) -> Sums:
        """The losses since the last call; the only place where the host waits for the device."""
        return self._pending.collect()

    def _replica(self, update: int, replica: int, samples: Mapping[str, Tensor]) -> int:
        """Forward and backward of one replica's micro-batches; returns how many items its loss counts."""
        count = 0
        for index in range(self._num_accumulation):
            seed_torch(self._device, "micro-batch", self._seed, update, replica, index)
            loss = self._workload.loss(self.model, {name: rows[index] for name, rows in samples.items()})
            loss.sum.backward()
            self._pending.add(loss)
            count += loss.count
        return count

    def _replicas_in_turn(self, update: int, samples: Mapping[str, Tensor]) -> int:
        """Every replica starts from the same buffers; gradients are summed, buffers averaged, over the tree."""
        start = [buffer.clone() for buffer in self._buffers]
        tree = TreeSum()
        count = 0
        for slot, replica in enumerate(self._replicas):
            if slot and start:
                torch._foreach_copy_(self._buffers, start)
            count += self._replica(update, replica, {name: rows[slot] for name, rows in samples.items()})
            tree.push(self._taken())
        sums = tree.total()
        for param, grad in zip(self._params, sums, strict=False):
            param.grad = grad
        averaged = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        for buffer, total in zip(averaged, sums[len(self._params) :], strict=True):
            assert total is not None
            torch.mul(total, 1.0 / len(self._replicas), out=buffer)
        return count

    def _taken(self) -> Tensors:
        """This replica's gradients, taken out of the parameters, and copies of its floating-point buffers."""
        taken: Tensors = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        return taken + [buffer.clone() for buffer in self._buffers if buffer.is_floating_point()]
