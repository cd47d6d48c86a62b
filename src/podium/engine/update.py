"""One weight update. Called by `train.py` for every update.

    (in the first one, if `engine.compile` is true: one instance of each host compiles, then the others load)
    for each local replica:
        for each of its micro-batches: seed by position, forward, backward of the loss *sum*
        push its gradients (and buffers) onto the tree
    combine the sums of all instances, starting while the last backward pass still runs
    in some updates, compute one replica's gradients once more and compare them (`audit.py`)
    one optimiser step on (sum of gradients) / (sum of counts)

The passes are in `replicas.py`; their order is in `parallelism.py`, which knows how replicas are divided between
instances. The host never reads a value from the device in here; `collect()` does, once for many updates.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from podium.distributed.lockstep import largest_span
from podium.distributed.lost import InstanceLost
from podium.distributed.reduction.tree import replica_mean
from podium.engine.audit import AuditOptions, Audits
from podium.engine.compile import Compiled, compiled, deterministic_algorithms
from podium.engine.compile_cache import Executable
from podium.engine.graph import PassGraph
from podium.engine.losses import Sums
from podium.engine.parallelism import Parallelism
from podium.engine.replay import Replay
from podium.engine.replicas import NO_SPAN, LocalReplicas, Span
from podium.engine.state import Task, TrainState
from podium.errors import UserError
from podium.optim.optimisers import clip_divisor, step
from podium.optim.stochastic_rounding import StochasticRounding
from podium.recipe.sections.batch import BatchSection
from podium.replica_tree import deal


@dataclass(frozen=True)
class UpdateOptions:
    """The recipe's settings for updates."""

    batch: BatchSection
    seed: int
    #: largest global norm of the mean gradient
    clip_norm: float | None = None
    stochastic_rounding: bool = False
    #: compile the model in the first update
    compile: bool = False
    #: capture both passes of a micro-batch in the first update, and replay them
    graph: bool = False
    #: compute some gradients a second time
    audit: AuditOptions | None = None


@dataclass(frozen=True)
class Events:
    """Callbacks of the engine."""

    #: called with the seconds of every wait for other instances
    waited: Callable[[float], None] = lambda seconds: None
    #: called with what the first update compiled or loaded
    compiled: Callable[[Executable], None] = lambda executable: None
    #: a context around each pass and step: forward, backward, optimiser
    span: Span = lambda name: NO_SPAN


class Engine:
    """The weight updates of this instance's replicas, made together with the other instances."""

    def __init__(
        self,
        task: Task,
        state: TrainState,
        parallelism: Parallelism,
        options: UpdateOptions,
        events: Events | None = None,
    ) -> None:
        self._task, self._state, self._parallelism, self._options = task, state, parallelism, options
        self._events = events or Events()
        model, optimiser, batch, group = state.model, state.optimiser, options.batch, parallelism.data_group
        self._params = [param for group in optimiser.param_groups for param in group["params"]]
        device = self._params[0].device
        self._rounding = StochasticRounding(options.seed) if options.stochastic_rounding else None
        self._buffers = [buffer for buffer in model.buffers() if not buffer.is_meta]
        self._averaged = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._num_replicas = batch.num_replicas
        self._replicas = LocalReplicas(
            task.workload,
            deal(batch.num_replicas, group.count)[group.index],
            batch.num_accumulation,
            options.seed,
            self._buffers,
            device,
            state.loss_scale,
            self._events.span,
            is_alone=group.count == 1,
        )
        if options.graph:
            self._replicas.graph = PassGraph(device, self._params, self._buffers, self._replicas.both_passes)
        self._num_pending = 0
        #: makes the step of the update whose gradients are summed, until it is made
        self._due: Callable[[], None] | None = None
        #: how many updates are made, but for weights that other instances have not told yet
        self.num_made = 0
        self._compiled: Compiled | None = None
        self._executable: Executable | None = None
        if options.compile:
            if (span := largest_span(model)) > 1:
                raise UserError(f"norm.span = {span} cannot be compiled: leave engine.compile=false")
            self._compiled = compiled(model, device)
        self._audits: Audits | None = None
        if options.audit is not None:  # before `connect`, so that it sees gradients of single replicas
            self._audits = Audits(
                options.audit,
                model,
                self._params,
                self._buffers,
                self._num_replicas,
                group,
                options.seed,
                self._events.waited,
            )
        if self._may_replay(device) and not options.graph:
            self._replicas.replay = Replay(model, task.workload, self._params)
        parallelism.connect(
            self._compiled or model, self._params, self._averaged, batch.num_replicas, self._events.waited
        )

    def update(self, update: int, samples: Mapping[str, Tensor], lr: float, stop: bool = False) -> bool:
        """Make update number `update` (0-based); `samples`: (local replicas, accumulation, micro-batch, …).

        Return whether any instance passed `stop`: the same value on all of them, in the same update.
        """
        if self._compiled is not None and self._executable is None:
            first = {name: rows[0, 0] for name, rows in samples.items()}
            self._executable = self._compiled.make(self._task.workload.loss, first, self._parallelism.instances)
            self._events.compiled(self._executable)
        scale = self._state.loss_scale
        before = [buffer.clone() for buffer in self._buffers] if scale.automatic else []
        factor = scale.factor
        audit = self._audits if self._audits is not None and self._audits.begin(update, self._replicas) else None
        with nullcontext() if self._compiled is None else deterministic_algorithms():
            try:
                count, stop = self._gradients(update, samples, stop)
                if audit is not None:
                    audit.check(update, self._compiled or self._state.model, self._replicas)
            except InstanceLost:
                self._undo()
                raise
        self._due = partial(self._step, update, count * factor if scale.automatic or factor != 1 else count, lr, before)
        self._parallelism.before_step()
        self.finish()
        self._parallelism.after_step()
        return stop

    @property
    def can_finish(self) -> bool:
        """Whether an update has all that its step needs, and has not made it."""
        return self._due is not None

    def finish(self) -> None:
        """Make the step of the update whose gradients are summed, without a word from other instances."""
        assert self._due is not None
        due, self._due = self._due, None
        due()
        self._num_pending += 1
        self._replicas.pending.complete()

    def give_up(self) -> None:
        """Leave the state as it was before the update whose step is not made."""
        if self._due is not None:
            self._due = None
            self._undo()

    def _step(self, update: int, divisor: Tensor | float, lr: float, before: list[Tensor]) -> None:
        """Change the weights, or leave them and the buffers as they were `before` where gradients have overflowed."""
        scale, clip_norm, norms = self._state.loss_scale, self._options.clip_norm, None
        if scale.automatic or clip_norm is not None:
            norms = self._parallelism.gradient_norms(self._state.optimiser, self._params)
        found_inf = scale.observe(norms) if scale.automatic and norms is not None else None
        if norms is not None and clip_norm is not None:
            divisor, _ = clip_divisor(norms, divisor, clip_norm, self._parallelism.total_norm)
        if self._rounding is not None:
            self._rounding.begin(update)
        with self._events.span("optimiser"):
            step(self._state.optimiser, divisor, lr, self._rounding, found_inf)
        if found_inf is not None:
            for buffer, value in zip(self._buffers, before, strict=True):
                buffer.copy_(torch.where(found_inf > 0, value, buffer))
        for param in self._params:
            param.grad = None
        self.num_made = update + 1

    def _may_replay(self, device: torch.device) -> bool:
        """Return whether passes may be replayed: where nobody looks into them, and nothing changes from one to the
        next that a recorded pass would not know."""
        alone = self._compiled is None and self._audits is None and self._events.span is Events.span
        alone = alone and largest_span(self._state.model) == 1 and not self._state.loss_scale.automatic
        return alone and self._parallelism.replays and device.type == "cpu"

    def _undo(self) -> None:
        """Leave the model as it was before this update, whose gradients could not be summed."""
        self._replicas.reset_buffers()
        for param in self._params:
            param.grad = None

    def _gradients(self, update: int, samples: Mapping[str, Tensor], stop: bool) -> tuple[Tensor | float, bool]:
        """Leave the sums over all replicas in `param.grad`; return what to divide them by, and whether to stop.

        Every replica starts from the same buffers; gradients are summed, buffers averaged, over the tree.
        """
        replicas = self._replicas
        replicas.begin(update, samples)
        divisor, stop = self._parallelism.run_replicas(replicas, stop)
        if self._num_replicas > 1:
            before = [buffer for buffer in replicas.start_buffers if buffer.is_floating_point()] or self._averaged
            for buffer, total, first in zip(self._averaged, self._parallelism.buffer_totals, before, strict=True):
                buffer.copy_(replica_mean(total, first, self._num_replicas))
        return divisor, stop

    def collect(self) -> Sums:
        """Return the losses of all instances since the last call. This is the only place where the host waits for the
        device."""
        found = self._parallelism.collect(self._replicas.pending, self._num_pending)
        self._num_pending = 0
        return found

    def rescue(self) -> Sums:
        """Return what `collect` would, of complete updates, though some instances may be gone; nothing else is called
        afterwards. Raises InstanceLost where that is not possible."""
        return self._parallelism.rescue(self._replicas.pending, self._num_pending)
