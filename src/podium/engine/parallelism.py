"""The four forms of parallelism, one of which a run uses. Everything that depends on the form is here.

    Replicated         whole replicas on every instance; gradients are summed over the tree of replicas
    ShardedOptimiser   the same, but each instance keeps the optimiser state of some parameters, and steps only these
    FullySharded       weights, gradients and optimiser state are sharded by rows over the instances
    Pipelined          one replica spans several instances, each of which has a stage of the model

`training/build.py` chooses one; `update.py` runs the replicas of an update through it, `train.py` gets whole weights
from it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from podium.contract import Batch, Loss, ParamGroup, Workload
from podium.distributed.instances import Instances
from podium.distributed.lockstep import SideBySide, check_span, largest_span
from podium.distributed.lost import InstanceLost
from podium.distributed.pipeline.meta_blocks import local_tensors
from podium.distributed.reduction.ddp import DdpReduction
from podium.distributed.reduction.exact import ExactReduction
from podium.distributed.reduction.tree import LocalReduction, Reduction, TreeSum
from podium.distributed.sharding.fully_sharded import ShardedModel, ShardedReduction
from podium.distributed.sharding.optimiser_state import Shares
from podium.engine.ledgers import SentLedgers
from podium.engine.losses import PendingLosses, Sums
from podium.engine.replicas import LocalReplicas
from podium.optim.optimisers import Optimiser, build_optimiser
from podium.optim.steps import norms_of
from podium.recipe.sections.optim import OptimSection
from podium.replica_tree import deal

if TYPE_CHECKING:  # torch's pipelines load its compiler, which takes long
    from podium.distributed.pipeline.stage_model import Cut

Waited = Callable[[float], None]
ReductionName = Literal["exact", "fast"]


class Parallelism:
    """The base of all forms; its methods are those of whole replicas on every instance."""

    #: the instances that hold the stages of the same replicas, where a replica spans several
    pipeline_group: Instances | None = None
    #: how the model is cut, where a replica spans several instances
    cut: "Cut | None" = None
    #: all instances, where each holds only a part of the optimiser state, so that a checkpoint needs them all
    holders: Instances | None = None
    #: whether this instance needs samples
    takes_samples = True
    #: whether this instance has all weights by itself
    has_all_weights = True
    #: whether nothing but gradients leaves the passes of this form, so that they can be replayed
    replays = False

    def __init__(
        self,
        model: nn.Module,
        instances: Instances,
        reduction: ReductionName = "exact",
        data_group: Instances | None = None,
    ) -> None:
        self.model = model
        #: all instances of the run
        self.instances = instances
        #: the data-parallel group: the instances that hold the same part of other replicas
        self.data_group = data_group or instances
        self._reduction_name = reduction
        self._reduction: Reduction
        self._side_by_side: SideBySide | None = None
        self._num_replicas = 1
        self._ledgers = self.instances.ledgers
        #: where instances share no memory, and may go on without one another
        self._sent_ledgers: SentLedgers | None = None
        self._waited: Waited = lambda seconds: None

    # --- an update, in the order of the calls -----------------------------------------------------------------------

    def build_optimiser(self, section: OptimSection, groups: list[ParamGroup], own_class: Any = None) -> Optimiser:
        """Build the optimiser of the parameters that this instance steps; `own_class`: the user's, if it is one."""
        return build_optimiser(section, self.model, groups, own_class=own_class)

    def connect(
        self,
        model: nn.Module,
        params: list[nn.Parameter],
        buffers: list[Tensor],
        num_replicas: int,
        waited: Waited,
    ) -> None:
        """Prepare to sum gradients and `buffers` over all replicas of the run.

        Passes run through `model`: the model itself, or compiled. `waited` is called with the seconds of every wait for
        other instances.
        """
        span = largest_span(self.model)
        check_span(span, num_replicas, self.data_group.count, self._reduction_name)
        self._num_replicas, self._waited = num_replicas, waited
        if self._ledgers and not self.instances.share_memory and self.can_regroup():
            sizes = [len(block) for block in deal(num_replicas, self.instances.count)]
            self._sent_ledgers = SentLedgers(self.instances, sizes)
        self._reduction = self._build_reduction(model, params, buffers)
        self._side_by_side = None
        if span > 1:
            self._side_by_side = SideBySide(model, params, span, num_replicas, self.data_group, waited)

    def _build_reduction(self, model: nn.Module, params: list[nn.Parameter], buffers: list[Tensor]) -> Reduction:
        if self.data_group.count == 1:
            return LocalReduction(model, params, buffers)
        if self._reduction_name == "exact":
            # Layers that share statistics send messages in the backward pass, too; a device takes them in one order.
            alone = self.instances.device.type == "cpu" or largest_span(self.model) == 1
            return ExactReduction(
                model, params, buffers, self.data_group, self._num_replicas, self._waited, during_backward=alone
            )
        return DdpReduction(model, params, buffers, self.data_group, self._waited)

    def run_replicas(self, replicas: LocalReplicas, stop: bool) -> tuple[Tensor | float, bool]:
        """Run both passes of all local replicas; leave the sums of all replicas' gradients in `param.grad`.

        Returns what to divide them by, and whether any instance passed `stop`.
        """
        if self._side_by_side is None:
            self._run_in_turn(replicas, stop)
        elif self._side_by_side.size == 1:  # the rest of the span is on other instances
            self._side_by_side.run(lambda model, position: self._run_in_turn(replicas, stop))
        else:
            self._run_side_by_side(self._side_by_side, replicas, stop)
        divisor, stop = self._reduction.finish()
        if self._sent_ledgers is not None:
            self._sent_ledgers.receive()
        return divisor, stop

    def _run_in_turn(self, replicas: LocalReplicas, stop: bool) -> None:
        """Run one replica after the other. Sums are sent to other instances while the last backward pass runs."""
        tree = TreeSum(self._num_replicas, replicas.numbers)
        for slot in range(replicas.num):
            if slot:
                replicas.reset_buffers()
            for index in range(replicas.num_micro_batches):
                last = slot == replicas.num - 1 and index == replicas.num_micro_batches - 1
                with self._reduction.micro_batch(last):
                    loss = replicas.forward(self._reduction.model, slot, index)
                    replicas.add(loss)
                    if last:
                        self._publish(replicas)
                        self._reduction.start(tree, replicas.count, stop)
                    replicas.backward(loss)
                    del loss  # not while the next pass runs: see PendingLosses
            if slot < replicas.num - 1:
                taken = self._reduction.take()
                tree.push(replicas.owned(taken) if tree.is_next_kept else taken)

    def _run_side_by_side(self, side_by_side: SideBySide, replicas: LocalReplicas, stop: bool) -> None:
        """Do the same where layers share statistics between replicas: those of a span run side by side."""
        tree = TreeSum(self._num_replicas, replicas.numbers)
        for first in range(0, replicas.num, side_by_side.size):
            if first:
                replicas.reset_buffers()

            def run_one(model: nn.Module, position: int, first: int = first) -> list[Loss]:
                losses = []
                for index in range(replicas.num_micro_batches):
                    losses.append(replicas.forward(model, first + position, index))
                    replicas.backward(losses[-1])
                return losses

            for losses in side_by_side.run(run_one):
                for loss in losses:
                    replicas.add(loss)
            for tensors in side_by_side.take():
                tree.push(tensors)
            if first + side_by_side.size < replicas.num:
                tree.push(self._reduction.take())
        self._publish(replicas)
        # Gradients are not sent during the backward pass here: with several replicas per instance, that saves little.
        self._reduction.start(tree, replicas.count, stop)

    def _publish(self, replicas: LocalReplicas) -> None:
        """Let the others read the losses of this update before any of them can complete it."""
        if self._sent_ledgers is not None:
            self._sent_ledgers.publish(replicas.pending, replicas.update)
        elif self._ledgers:
            replicas.pending.publish(self._ledgers[self.instances.index], replicas.update)

    @property
    def exchange_s(self) -> float | None:
        """Seconds that sums of gradients with other instances have taken, hidden behind the backward pass or not; None
        where this form does not know."""
        return getattr(self._reduction, "exchange_s", None)

    @property
    def buffer_totals(self) -> list[Tensor]:
        """The sums of all replicas' floating-point buffers, after `run_replicas`."""
        return self._reduction.buffer_totals

    def gradient_norms(self, optimiser: Optimiser, params: Sequence[nn.Parameter]) -> Tensor:
        """Return the norms of the gradients of all parameters that have one."""
        return norms_of([param.grad for param in params if param.grad is not None])

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from the total of `gradient_norms`."""
        return norm

    def before_step(self) -> None:
        """Wait until every instance has what it needs for the step, where otherwise some could not make it any more."""

    def after_step(self) -> None:
        """Update all weights on every instance, where each instance stepped only some of them."""

    def collect(self, pending: PendingLosses, num_updates: int) -> Sums:
        """Wait for the device and return the losses of all instances."""
        sizes = [len(block) for block in deal(self._num_replicas, self.instances.count)]
        return pending.collect_alike(self.instances, num_updates, sizes)

    # --- where instances come and go --------------------------------------------------------------------------------

    def can_regroup(self) -> bool:
        """Return whether every instance has the whole state, and could go on with others than these."""
        return False

    def rescue(self, pending: PendingLosses, num_updates: int) -> Sums:
        """Return the losses that `collect` would, though some instances may be gone."""
        sizes = [len(block) for block in deal(self._num_replicas, self.instances.count)]
        if self.instances.count == 1:
            return pending.collect_alike(self.instances, num_updates, sizes)
        if not (self._ledgers and pending.is_readable):
            raise InstanceLost(None, "its losses since the last record are lost with it")
        return pending.rescued(self._ledgers, self.instances.index, num_updates, sizes)

    def leave(self) -> None:
        """Take no further part in these instances; those that wait for this one raise InstanceLost."""
        self._reduction.leave()
        self.instances.leave()

    # --- between updates --------------------------------------------------------------------------------------------

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """Return a context that gives the model with all weights. Collective where they are sharded by rows."""
        return nullcontext(self.model)

    def losses(
        self, model: nn.Module, workload: Workload, batches: Iterable[Batch], sizes: Iterable[int]
    ) -> Iterator[Loss]:
        """Yield the losses of micro-batches in evaluation mode; `sizes` are their numbers of samples."""
        for batch in batches:
            yield workload.loss(model, batch)

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights and buffers, sorted by name, on instance 0. `model` is the whole model."""
        if self.instances.index == 0:
            yield from sorted(local_tensors(model).items())

    @property
    def saves(self) -> bool:
        """Whether this instance takes part in writing checkpoints."""
        return self.data_group.index == 0 or self.holders is not None


class Replicated(Parallelism):
    """Whole replicas on every instance."""

    replays = True

    def can_regroup(self) -> bool:
        instances = self.instances
        readable = instances.count == 1 or bool(self._ledgers)
        # Of one host, the group that carries messages is made when it is first needed, by some instances perhaps not.
        messages = instances.uses_messages and (instances.share_memory or largest_span(self.model) > 1)
        return self._reduction_name == "exact" and readable and not messages


class ShardedOptimiser(Parallelism):
    """Whole replicas, where every instance keeps the optimiser state of some parameters, steps these and hands them to
    the others. `parallel.shard: optimiser`, with `launch.spare_copies`."""

    def __init__(
        self, model: nn.Module, instances: Instances, reduction: ReductionName = "exact", num_spares: int = 0
    ) -> None:
        super().__init__(model, instances, reduction)
        self.holders = instances
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._num_spares, self._shares = num_spares, Shares(params, instances, num_spares)

    def build_optimiser(self, section: OptimSection, groups: list[ParamGroup], own_class: Any = None) -> Optimiser:
        return build_optimiser(section, self.model, groups, self._shares.held, own_class)

    def before_step(self) -> None:
        if self._num_spares:
            self.instances.barrier()

    def after_step(self) -> None:
        self._shares.broadcast(self._waited)

    def held(self) -> set[str]:
        """Return the names of the parameters that this instance steps."""
        return self._shares.held

    def can_regroup(self) -> bool:
        in_memory = self.instances.share_memory and bool(self._ledgers) and not self.instances.uses_messages
        return bool(self._num_spares) and self._reduction_name == "exact" and in_memory


class FullySharded(Parallelism):
    """Weights sharded by rows, which are gathered for the passes of one block at a time.
    `parallel.shard: parameters`."""

    has_all_weights = False

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], instances: Instances) -> None:
        """Shard `model` in place. Collective."""
        super().__init__(model, instances, "fast")
        self.holders = instances
        self._sharded = ShardedModel(model, blocks, instances)

    def build_optimiser(self, section: OptimSection, groups: list[ParamGroup], own_class: Any = None) -> Optimiser:
        assert own_class is None, "check_fully_sharded refuses these"
        optimiser = build_optimiser(section, self._sharded.shards, groups)
        optimiser.rows = self._sharded.shards.rows
        return optimiser

    def _build_reduction(self, model: nn.Module, params: list[nn.Parameter], buffers: list[Tensor]) -> Reduction:
        return ShardedReduction(self._sharded, buffers, self.instances, self._waited)

    def total_norm(self, norm: Tensor) -> Tensor:
        return self._sharded.total_norm(norm)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        return self._sharded.whole()


class Pipelined(Parallelism):
    """Replicas that span several instances, each with a stage that micro-batches pass through. `parallel.stages`."""

    has_all_weights = False

    def __init__(self, model: nn.Module, cut: "Cut", instances: Instances) -> None:
        """Take `cut`, this instance's stage of the model."""
        super().__init__(model, instances, "exact", cut.data_group)
        self.cut, self._pipeline = cut, cut.pipeline
        self.pipeline_group = cut.pipeline.group
        self.takes_samples = cut.pipeline.has_losses

    def run_replicas(self, replicas: LocalReplicas, stop: bool) -> tuple[Tensor | float, bool]:
        tree = TreeSum(self._num_replicas, replicas.numbers)
        for slot in range(replicas.num):
            if slot:
                replicas.reset_buffers()
            enter = partial(replicas.enter, slot)
            for loss in self._pipeline.run(replicas.batches(slot), enter, replicas.scale):
                replicas.add(loss)
                del loss
            if slot < replicas.num - 1:
                tree.push(self._reduction.take())
        # Gradients are sent once all of this device's are complete: devices finish one after the other, so some send
        # while others still run.
        self._reduction.start(tree, *self._pipeline.agree_on(replicas.count, stop))
        return self._reduction.finish()

    def gradient_norms(self, optimiser: Optimiser, params: Sequence[nn.Parameter]) -> Tensor:
        names = [optimiser.names[param] for param in params if param.grad is not None]
        return self._pipeline.all_norms(names, super().gradient_norms(optimiser, params))

    def collect(self, pending: PendingLosses, num_updates: int) -> Sums:
        return pending.collect(self.instances, num_updates)  # only some instances have losses

    def losses(
        self, model: nn.Module, workload: Workload, batches: Iterable[Batch], sizes: Iterable[int]
    ) -> Iterator[Loss]:
        if self._pipeline.has_losses:
            yield from self._pipeline.losses(batches)
        else:
            self._pipeline.forward_parts(sizes)

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        if self.data_group.index == 0:
            yield from self._pipeline.weights()
