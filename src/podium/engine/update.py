"""One weight update of the local replicas. Owns the `engine` section; called by `train.py` for every update.

    (the first one, where `engine.compile` is true: one instance of each host compiles, then the others load)
    for each local replica:
        for each of its micro-batches: seed by place, forward, backward of the loss *sum*
        push its gradients (and buffers) onto the tree
      (where batch norm spans several replicas, those run side by side: see `span.py`; where replicas are cut into
      stages, the micro-batches of one go through all devices: see `pipeline.py`)
    join the sums of all instances, begun while the last backward still runs
    one optimiser step on (sum of gradients) / (sum of counts); of a share of the parameters where these are shared out

The host never looks at a device value in here; `collect()` does, once per call of many updates.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from podium.batch import BatchSection
from podium.engine.agree import all_told
from podium.engine.buckets import Buckets
from podium.engine.compiled import Compiled, compiled, same_every_time
from podium.engine.executables import Executable
from podium.engine.fast import Fast
from podium.engine.instances import Instances
from podium.engine.precision import LossScale, PrecisionSection
from podium.engine.randomness import seed_torch
from podium.engine.reduce import Local, Reduction, TreeSum, replica_mean
from podium.engine.sharded import Shares
from podium.engine.span import SideBySide, check_span, largest_span
from podium.engine.spread import SpreadModel, SpreadSums
from podium.engine.trap import Trap
from podium.errors import UserError
from podium.optim.kernels import norms_of
from podium.optim.optimisers import Optimiser, clip_divisor, step
from podium.optim.rounding import StochasticRounding
from podium.schema import Section
from podium.workloads.base import Loss, Workload

if TYPE_CHECKING:  # loads torch's compiler with torch's pipelines, which takes long
    from podium.engine.pipeline import Pipeline


class EngineSection(Section):
    """How updates are carried out on the machine; none of it changes what is learnt."""

    #: the host looks at losses only every so many updates
    updates_per_call: PositiveInt = 50
    #: threads per replica; part of the numerics. `auto` is cores // replicas, at least 1
    threads: PositiveInt | Literal["auto"] = "auto"
    #: blocks of samples made ready ahead of time
    prefetch: NonNegativeInt = 2
    device: str = "auto"
    #: exact: the same bits on any number of instances; fast: torch's DistributedDataParallel
    reduction: Literal["exact", "fast"] = "exact"
    #: memory layout of convolutions; part of the numerics. `auto` is channels_last on a CPU, else default
    layout: Literal["auto", "default", "channels_last"] = "auto"
    #: make machine code of the whole model with torch.compile; part of the numerics
    compile: bool = False
    #: choices measured by `podium tune`: use those remembered, or measure first where there are none
    tune: Literal["off", "remembered", "measure"] = "remembered"
    #: also the choices that change bits
    tune_bits: bool = False


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

    def collect(self, instances: Instances | None = None) -> Sums:
        """Waits for the device and hands the values of all instances over.

        Instances may have any number of parts, none included. Two messages.
        """
        names, values = self._taken()
        if instances is None or instances.count == 1:
            return _sums(names, values)
        sums = Sums()
        # JSON keeps every float to the bit (also nan and infinities, in Python), and runs nothing when read.
        for their_names, their_values in all_told(instances, [names, values.tolist()]):
            sums.extend(_sums(their_names, torch.tensor(their_values, dtype=torch.float64).view(-1, 2)))
        return sums

    def collect_alike(self, instances: Instances, num_updates: int) -> Sums:
        """The same where every instance holds parts of the same names in the same order, as in training. One message.

        Parts come in the order in which one instance would have them: by update, then by replica.
        """
        names, values = self._taken()
        if instances.count == 1 or not names:
            return _sums(names, values)
        gathered = instances.gather(values.view(num_updates, -1, 2)).transpose(0, 1)
        per_update = len(names) // num_updates
        order = [
            name
            for start in range(0, len(names), per_update)
            for name in names[start : start + per_update] * instances.count
        ]
        return _sums(order, gathered.reshape(-1, 2))

    def _taken(self) -> tuple[list[str], Tensor]:
        """(names, (parts, 2) of sums and counts in float64, which holds them all); nothing is pending afterwards."""
        names = [name for name, _ in self._labels]
        values = torch.zeros(len(names), 2, dtype=torch.float64)
        if names:
            alike = all(value.dtype == self._values[0].dtype for value in self._values)
            # One transfer from the device, however many values there are.
            values[:, 0] = torch.stack(self._values if alike else [value.double() for value in self._values])
            values[:, 1] = torch.tensor([count for _, count in self._labels], dtype=torch.float64)
        self._values, self._labels = [], []
        return names, values


def _sums(names: Iterable[str], values: Tensor) -> Sums:
    sums = Sums()
    for name, (total, count) in zip(names, values.tolist(), strict=True):
        sums.add(name, total, int(count))
    return sums


class Engine:
    """Carries the replicas of this instance through weight updates, together with the other instances."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        optimiser: Optimiser,
        batch: BatchSection,
        replicas: range,
        seed: int,
        clip_norm: float | None = None,
        *,
        precision: PrecisionSection | None = None,
        instances: Instances | None = None,
        reduction: Literal["exact", "fast"] = "exact",
        compile: bool = False,
        pipeline: "Pipeline | None" = None,
        peers: Instances | None = None,
        waited: Callable[[float], None] = lambda seconds: None,
        made: Callable[[Executable], None] = lambda executable: None,
        shares: Shares | None = None,
        spread: SpreadModel | None = None,
    ) -> None:
        """`replicas` are those of this instance: its aligned block. With a `pipeline` it carries one stage of them, as
        its `peers` do of other blocks. `waited` is told the seconds of every wait for other instances, `made` what the
        first update compiled or loaded. `shares`: who steps which parameter. `spread`: the model where its parameters
        are spread over the instances."""
        self.model = model
        self._workload = workload
        self._optimiser = optimiser
        self._clip_norm = clip_norm
        precision = precision or PrecisionSection()
        self.loss_scale = LossScale(precision.loss_scale)
        self._rounding = StochasticRounding(seed) if precision.rounds_stochastically else None
        self._trap = Trap(model, backward=not self.loss_scale.automatic) if precision.trap else None
        self._num_accumulation = batch.num_accumulation
        self._num_replicas = batch.num_replicas
        self._replicas = replicas
        self._seed = seed
        self._params = [p for group in optimiser.param_groups for p in group["params"]]
        self._device = self._params[0].device
        self._buffers = [buffer for buffer in model.buffers() if not buffer.is_meta]
        self._averaged = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._pending = PendingLosses()
        self._num_pending = 0
        self._instances = instances or Instances.alone()
        self._pipeline = pipeline
        peers = peers or self._instances  # those that carry other replicas
        share = self._num_replicas // peers.count
        first = peers.index * share
        assert replicas == range(first, first + share), "an instance carries its aligned block of replicas"
        self._names = [optimiser.names[param] for param in self._params]
        span = largest_span(model)
        check_span(span, self._num_replicas, peers.count, reduction)
        self._compiled: Compiled | None = None
        self._executable: Executable | None = None
        self._made, self._waited, self._shares = made, waited, shares
        self._reduction: Reduction
        if compile:
            if span > 1:
                raise UserError(f"norm.span = {span} cannot be compiled: leave engine.compile=false")
            model = self._compiled = compiled(model, self._device)
        self._norm_of_all = (lambda norm: norm) if spread is None else spread.norm_of_all
        if spread is not None:
            self._reduction = SpreadSums(spread, self._averaged, self._instances, waited)
        elif peers.count == 1:
            self._reduction = Local(model, self._params, self._averaged)
        elif reduction == "exact":
            self._reduction = Buckets(model, self._params, self._averaged, peers, waited)
        else:
            self._reduction = Fast(model, self._params, self._averaged, peers, waited)
        self._side_by_side: SideBySide | None = None
        if span > 1:
            self._side_by_side = SideBySide(model, self._params, span, len(replicas), peers, waited)

    def update(self, update: int, samples: Mapping[str, Tensor], lr: float, stop: bool = False) -> bool:
        """Update number `update` (0-based); `samples`: (local replicas, accumulation, micro-batch, …).

        True when any instance passed `stop`: the same answer on all of them, in the same update.
        """
        if self._compiled is not None and self._executable is None:
            first = {name: rows[0, 0] for name, rows in samples.items()}
            self._executable = self._compiled.make(self._workload.loss, first, self._instances)
            self._made(self._executable)
        before = [buffer.clone() for buffer in self._buffers] if self.loss_scale.automatic else []
        scale = self.loss_scale.value
        with nullcontext() if self._compiled is None else same_every_time():
            count, stop = self._gradients(update, samples, stop)
        divisor = count * scale if scale != 1 else count
        norms = self._norms() if self.loss_scale.automatic or self._clip_norm is not None else None
        if norms is None or self.loss_scale.accepts(norms):
            if norms is not None and self._clip_norm is not None:
                divisor, _ = clip_divisor(norms, divisor, self._clip_norm, self._norm_of_all)
            if self._rounding is not None:
                self._rounding.begin(update)
            step(self._optimiser, divisor, lr, self._rounding)
            if self._shares is not None:
                self._shares.give(self._waited)
        elif before:
            torch._foreach_copy_(self._buffers, before)
        for param in self._params:
            param.grad = None
        self._num_pending += 1
        return stop

    def collect(self) -> Sums:
        """The losses of all instances since the last call; the only place where the host waits for the device."""
        num_updates, self._num_pending = self._num_pending, 0
        if self._pipeline is not None:  # only some instances have losses
            return self._pending.collect(self._instances)
        return self._pending.collect_alike(self._instances, num_updates)

    def _norms(self) -> Tensor:
        """Those of the gradients of all parameters that have one."""
        there = [index for index, param in enumerate(self._params) if param.grad is not None]
        norms = norms_of([self._params[index].grad for index in there])
        if self._pipeline is None:
            return norms
        return self._pipeline.all_norms([self._names[index] for index in there], norms)

    def _gradients(self, update: int, samples: Mapping[str, Tensor], stop: bool) -> tuple[int | Tensor, bool]:
        """Leaves the sums over all replicas in `param.grad`; returns what to divide them by, and whether to stop.

        Every replica starts from the same buffers; gradients are summed, buffers averaged, over the tree.
        """
        num_local = len(self._replicas)
        start = [buffer.clone() for buffer in self._buffers] if num_local > 1 else []
        if self._pipeline is not None:
            self._through_stages(self._pipeline, update, samples, start, stop)
        elif self._side_by_side is None:
            self._in_turn(update, samples, start, stop)
        else:
            self._span_after_span(self._side_by_side, update, samples, start, stop)
        divisor, stop = self._reduction.finish()
        if self._num_replicas > 1:
            before = [buffer for buffer in start if buffer.is_floating_point()] or self._averaged
            for buffer, total, first in zip(self._averaged, self._reduction.buffer_totals, before, strict=True):
                buffer.copy_(replica_mean(total, first, self._num_replicas))
        return divisor, stop

    def _in_turn(self, update: int, samples: Mapping[str, Tensor], start: list[Tensor], stop: bool) -> None:
        """The local replicas one after the other."""
        num_local = len(self._replicas)
        tree = TreeSum(num_local)
        count = 0
        for slot in range(num_local):
            if slot and start:
                torch._foreach_copy_(self._buffers, start)
            for index in range(self._num_accumulation):
                last = slot == num_local - 1 and index == self._num_accumulation - 1
                with self._reduction.micro_batch(last):
                    loss = self._forward(self._reduction.model, update, slot, index, samples)
                    count += loss.count
                    if last:
                        self._reduction.start(tree, count, stop)
                    self._backward(loss)
                self._pending.add(loss)
            if slot < num_local - 1:
                tree.push(self._reduction.take())

    def _through_stages(
        self, pipeline: "Pipeline", update: int, samples: Mapping[str, Tensor], start: list[Tensor], stop: bool
    ) -> None:
        """The local replicas one after the other, the micro-batches of each through all devices."""
        num_local = len(self._replicas)
        tree = TreeSum(num_local)
        count = 0
        for slot in range(num_local):
            if slot and start:
                torch._foreach_copy_(self._buffers, start)
            batches = [
                {name: rows[slot, index] for name, rows in samples.items()}
                for index in range(self._num_accumulation if samples else 0)
            ]
            for loss in pipeline.run(batches, partial(self._enter, update, slot), self.loss_scale.value):
                self._pending.add(loss)
                count += loss.count
            if slot < num_local - 1:
                tree.push(self._reduction.take())
        # Gradients are sent when all are there: every part but one has ended before, and the others are still at work.
        self._reduction.start(tree, *pipeline.agreed(count, stop))

    def _span_after_span(
        self,
        side_by_side: SideBySide,
        update: int,
        samples: Mapping[str, Tensor],
        start: list[Tensor],
        stop: bool,
    ) -> None:
        """The same where layers share statistics between replicas: those of a span run side by side."""
        num_local, size = len(self._replicas), side_by_side.size
        if size == 1:  # the rest of the span is on other instances
            side_by_side.run(lambda model, position: self._in_turn(update, samples, start, stop))
            return
        tree = TreeSum(num_local)
        count = 0
        for first in range(0, num_local, size):
            if first and start:
                torch._foreach_copy_(self._buffers, start)

            def replica(model: nn.Module, position: int, first: int = first) -> list[Loss]:
                losses = []
                for index in range(self._num_accumulation):
                    losses.append(self._forward(model, update, first + position, index, samples))
                    self._backward(losses[-1])
                return losses

            for losses in side_by_side.run(replica):
                for loss in losses:
                    self._pending.add(loss)
                    count += loss.count
            for tensors in side_by_side.taken():
                tree.push(tensors)
            if first + size < num_local:
                tree.push(self._reduction.take())
        # Gradients are not sent while backward runs here: with several replicas per instance there is little to hide.
        self._reduction.start(tree, count, stop)

    def _forward(self, model: nn.Module, update: int, slot: int, index: int, samples: Mapping[str, Tensor]) -> Loss:
        """Forward pass of micro-batch `index` of the local replica `slot`, with random numbers of its own."""
        self._enter(update, slot, index)
        return self._workload.loss(model, {name: rows[slot, index] for name, rows in samples.items()})

    def _enter(self, update: int, slot: int, index: int) -> None:
        seed_torch(self._device, "micro-batch", self._seed, update, self._replicas[slot], index)
        if self._trap is not None:
            self._trap.enter(update, self._replicas[slot], index)

    def _backward(self, loss: Loss) -> None:
        scale = self.loss_scale.value
        (loss.sum if scale == 1 else loss.sum * scale).backward()
