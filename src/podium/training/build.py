"""Building everything a run needs from the recipe; the data is read, and nothing is written to disk.

`train.py` begins with it, and so do validation and prediction of a finished run.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from podium.checkpoints.initial_weights import load_initial_weights
from podium.checkpoints.reading import Checkpoint
from podium.contract import Workload
from podium.data.sample_plan import lengths_for
from podium.distributed.digest import check_equal_weights
from podium.distributed.instances import Instances
from podium.distributed.lockstep import check_span, largest_span
from podium.distributed.pipeline.partition import layers_of
from podium.distributed.placement import Placement
from podium.distributed.sharding.fully_sharded import check_equal_blocks, check_fully_sharded
from podium.engine.graph import CAPTURES
from podium.engine.loss_scale import LossScale
from podium.engine.parallelism import FullySharded, Parallelism, Pipelined, Replicated, ShardedOptimiser
from podium.engine.state import Lengths, Task, TrainState
from podium.errors import UserError
from podium.kernels.install import resolve_layout
from podium.layers.norm import AnyBatchNorm
from podium.machine.allocator import give_back_memory, keep_memory
from podium.machine.determinism import set_determinism
from podium.machine.device import device_name, has_float64, move_module, resolve_device, use_device
from podium.machine.threads import use_threads
from podium.optim.averaging import WeightAverage
from podium.optim.lr_scaling import scaled_lr
from podium.optim.optimisers import freeze
from podium.optim.schedules import build_schedule
from podium.recipe.loading import Recipe
from podium.recipe.section import is_own_name
from podium.topology import Topology, build_topology, resolve_threads, usable_cores
from podium.transforms.apply import apply_transforms
from podium.transforms.nan_trap import trap_gradients
from podium.transforms.seeding import seed_torch
from podium.transforms.thread_budget import busy_threads
from podium.ui import console
from podium.workloads.registry import own_member, workload_class


@dataclass
class Training:
    """A run that is ready to begin: its task, placement, form of parallelism, and state.

    Placement and form of parallelism change where instances come and go (`regrouping.py`).
    """

    recipe: Recipe
    task: Task
    placement: Placement
    parallelism: Parallelism
    state: TrainState


def build_training(
    recipe: Recipe,
    topology: Topology | None = None,
    instances: Instances | None = None,
    threads: int | None = None,
    *,
    fresh: bool = False,
    checkpoint: Checkpoint | None = None,
    data_of: Task | None = None,
) -> Training:
    """Build everything without touching the run folder; errors in the recipe or the data are raised here.

    `fresh`: load the initial weights that the recipe names, if any. `checkpoint`: continue from it. `data_of`: use the
    samples of this task instead of opening them again. Collective where there are several instances.
    """
    topology, instances = topology or build_topology(recipe.batch.num_replicas), instances or Instances.alone()
    local_index = topology.local_index(instances.index)
    device = use_device(resolve_device(recipe.engine.device, local_index, recipe.launch.instances_per_device))
    set_determinism(device, exact=recipe.engine.reduction == "exact", tf32=recipe.precision.tf32)
    threads = threads or threads_per_replica(recipe, topology)
    use_threads(threads)
    if recipe.parallel.shard == "parameters":
        give_back_memory()
    else:
        keep_memory()
    task = build_task(recipe, data_of)
    model, layers = build_model(
        recipe, task.workload, device, fresh=fresh, move=topology.num_stages == 1, tell=instances.index == 0
    )
    busy = threads
    if recipe.engine.threads == "auto" and device.type == "cpu":
        busy = busy_threads(threads, task.workload, model, recipe.batch.micro_batch)
        use_threads(busy)
    placement = Placement(topology, instances, device, threads, busy)
    num_blocks = topology.num_instances // topology.num_stages
    check_span(largest_span(model), topology.num_replicas, num_blocks, recipe.engine.reduction)
    check_audit(recipe, largest_span(model))
    check_graph(recipe, device, instances.count, largest_span(model), task)
    check_double_precision(recipe, task, model, placement)
    check_spare_copies(recipe)
    check_digests(recipe)
    if recipe.valid.recalibrate and not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        raise UserError(
            f"valid.recalibrate = {recipe.valid.recalibrate}: the model has no batch norm, and so no statistics to "
            "recompute: set it to 0"
        )
    if checkpoint is not None:
        checkpoint.restore(model)
    parallelism = build_parallelism(recipe, task.workload, model, layers, placement)
    state = TrainState(
        model,
        parallelism.build_optimiser(recipe.optim, task.workload.param_groups(model), own_of(recipe, "optim")),
        build_schedule(
            recipe.schedule,
            scaled_lr(
                lr=recipe.optim.lr,
                lr_exponent=recipe.optim.lr_exponent,
                scale=recipe.optim.scale,
                base_batch=recipe.optim.base_batch,
                global_batch=recipe.batch.global_batch,
            ),
            task.lengths.total_updates,
            task.lengths.updates_per_epoch,
            recipe.batch.global_batch,
            own_of(recipe, "schedule"),
        ),
        LossScale(recipe.precision.loss_scale, device),
        average=None if (method := recipe.average.method) == "none" else WeightAverage(method, recipe.average.decay),
    )
    if checkpoint is not None:
        checkpoint.restore_optimiser(state.optimiser, parallelism.holders)
        state.load(checkpoint.state, checkpoint.average)
        checkpoint.forget_tensors()
    return Training(recipe, task, placement, parallelism, state)


def check_audit(recipe: Recipe, span: int) -> None:
    """Raise UserError where audits are asked for and replicas are not computed whole, one after the other."""
    reasons = {
        "parallel.stages": recipe.parallel.num_stages > 1,
        "parallel.shard = parameters": recipe.parallel.shard == "parameters",
        "engine.reduction = fast": recipe.engine.reduction == "fast",
        f"norm.span = {span}": span > 1,
    }
    if recipe.engine.audit and (reason := next((name for name, holds in reasons.items() if holds), None)):
        raise UserError(
            f"engine.audit = {recipe.engine.audit:g} computes the gradients of one replica again, which {reason} does "
            "not leave by themselves: set it to 0"
        )


def check_graph(recipe: Recipe, device: torch.device, num_instances: int, span: int, task: Task) -> None:
    """Raise UserError where passes are to be captured, and cannot be replayed."""
    if not recipe.engine.graph:
        return
    reads = [name for name, field in task.train_source.fields.items() if field.read_on_host]
    reasons = {
        f"a device of the kind {device.type}, which has no graphs": device.type not in CAPTURES,
        f"{num_instances} instances: it is for one": num_instances > 1,
        f"norm.span = {span}": span > 1,
        "engine.compile": recipe.engine.compile,
        "engine.audit": bool(recipe.engine.audit),
        "parallel.recompute": recipe.parallel.recompute,
        "precision.trap": recipe.precision.trap,
        "precision.loss_scale = auto": recipe.precision.loss_scale == "auto",
        f"counts that the host reads from the samples ({', '.join(reads)})": bool(reads),
    }
    if reason := next((name for name, holds in reasons.items() if holds), None):
        raise UserError(f"engine.graph = true cannot be combined with {reason}: set it to false")


def check_double_precision(recipe: Recipe, task: Task, model: nn.Module, placement: Placement) -> None:
    """Raise UserError where double precision is needed on a device that has none."""
    device, several = placement.device, placement.topology.num_instances > 1
    if has_float64(device):
        return
    wide = [name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float64]
    fields = [name for name, field in task.train_source.fields.items() if np.dtype(field.dtype) == np.float64]
    needs = {
        f"norm.span = {largest_span(model)}": largest_span(model) > 1,
        "engine.reduction = fast": several and recipe.engine.reduction == "fast",
        f"{wide[0] if wide else ''} of the model": bool(wide),
        f"the samples' {fields[0] if fields else ''}": bool(fields),
    }
    if (what := next((name for name, holds in needs.items() if holds), None)) is not None:
        raise UserError(
            f"{what} needs numbers in double precision, which {device_name(device)} does not have: change it, or use "
            "engine.device=cpu"
        )


def check_spare_copies(recipe: Recipe) -> None:
    """Raise UserError where spare copies are asked for of what nobody could go on with."""
    parallel, asked = recipe.parallel, f"launch.spare_copies = {recipe.launch.spare_copies}"
    reasons = {
        "parallel.stages": parallel.num_stages > 1,
        "parallel.shard = parameters": parallel.shard == "parameters",
        "engine.reduction = fast": recipe.engine.reduction == "fast" and parallel.shard == "optimiser",
    }
    if recipe.launch.spare_copies and (reason := next((name for name, holds in reasons.items() if holds), None)):
        raise UserError(
            f"{asked} cannot be combined with {reason}, which restarts from the last checkpoint when an instance is "
            "lost: set it to 0"
        )


def check_digests(recipe: Recipe) -> None:
    """Raise UserError where weights are to be digested after every update and no instance has them all."""
    parallel = recipe.parallel
    reason = "parallel.stages" if parallel.num_stages > 1 else f"parallel.shard = {parallel.shard}"
    if recipe.log.digests == "updates" and (parallel.num_stages > 1 or parallel.shard == "parameters"):
        raise UserError(
            f"log.digests = updates needs all weights on every instance, which {reason} does not leave there: set it "
            "to records"
        )


def build_task(recipe: Recipe, data_of: Task | None = None) -> Task:
    """Open the samples and compute the length of the training."""
    if data_of is None:
        workload: Workload = workload_class(recipe.workload.name)(recipe.workload.model, recipe.workload.data)
        train_source, valid_source = workload.source("train"), workload.source("valid")
    else:
        workload, train_source, valid_source = data_of.workload, data_of.train_source, data_of.valid_source
    global_batch = recipe.batch.global_batch
    updates_per_epoch = len(train_source) // global_batch
    if updates_per_epoch == 0:
        raise UserError(
            f"there are {len(train_source)} training samples, not enough for one update of {global_batch} "
            f"(micro-batch {recipe.batch.micro_batch} × accumulation {recipe.batch.num_accumulation} × "
            f"replicas {recipe.batch.num_replicas})"
        )
    lengths_for(recipe.batch, train_source)  # raises if there are none
    total_updates = recipe.train.length.updates(updates_per_epoch=updates_per_epoch, global_batch=global_batch)
    if total_updates == 0:
        raise UserError(f"train.length = {recipe.train.length} is shorter than one update")
    return Task(workload, train_source, valid_source, Lengths(updates_per_epoch, total_updates, global_batch))


def build_model(
    recipe: Recipe,
    workload: Workload,
    device: torch.device,
    *,
    fresh: bool = False,
    move: bool = True,
    tell: bool = False,
) -> tuple[nn.Module, range]:
    """Return the model with its initial weights and the recipe's transforms, and which of its blocks are the layers
    that `parallel.stages` counts. Unless `move`, it stays on the host, to be cut into stages first. `tell`: show what
    was found of the weights to start from."""
    seed_torch(device, "weights", recipe.seed)
    model = workload.build_model().train()
    if fresh and recipe.workload.init_from is not None:
        matched = load_initial_weights(workload, model, recipe.workload.init_from)
        if tell:
            console.show_table(matched, message=True)
    freeze(model, recipe.optim.freeze)
    if move:
        move_module(model, device)
    blocks = [block for _, block in workload.stages(model)]
    layers = layers_of(blocks)
    apply_transforms(
        model,
        blocks,
        device,
        layout=resolve_layout(recipe.engine.layout, device, recipe.precision.computes_in_half),
        kernels=recipe.engine.kernels,
        precision=recipe.precision,
        recompute=recipe.parallel.recompute,
        compile=recipe.engine.compile,
    )
    return model, layers


def build_parallelism(
    recipe: Recipe, workload: Workload, model: nn.Module, layers: range, placement: Placement
) -> Parallelism:
    """Divide the model between the instances as the recipe says; raise UserError unless all start from the same
    bits."""
    instances, reduction, shard = placement.instances, recipe.engine.reduction, recipe.parallel.shard
    if placement.topology.num_stages > 1:
        # torch's pipelines load its compiler, which takes long.
        from podium.distributed.pipeline.stage_model import check_stages, cut_model

        check_stages(model, compile=recipe.engine.compile, reduction=reduction, shard=shard)
        cut = cut_model(
            model,
            workload,
            layers,
            instances,
            placement.device,
            batch=recipe.batch,
            parallel=recipe.parallel,
            precision=recipe.precision,
            optim=recipe.optim,
            own_class=own_of(recipe, "optim"),
        )
        check_equal_weights(model, cut.data_group)
        return Pipelined(model, cut, instances)
    check_equal_weights(model, instances)
    if instances.count > 1 and shard == "parameters":
        scale = recipe.precision.loss_scale
        check_fully_sharded(model, reduction, recipe.optim.name, recipe.engine.compile, scale)
        check_equal_blocks(placement.topology.num_replicas, instances.count)
        sharded = FullySharded(model, [block for _, block in workload.stages(model)], instances)
        if recipe.precision.trap:  # again, as sharding has replaced the parameters
            trap_gradients(model)
        return sharded
    return shared_out(recipe, model, instances)


def shared_out(recipe: Recipe, model: nn.Module, instances: Instances) -> Parallelism:
    """Return the form of parallelism where every instance has all weights."""
    if instances.count > 1 and recipe.parallel.shard == "optimiser":
        usable = instances.share_memory and instances.device.type == "cpu"  # else all restart when one is lost
        num_spares = recipe.launch.spare_copies if usable else 0
        return ShardedOptimiser(model, instances, recipe.engine.reduction, num_spares)
    return Replicated(model, instances, recipe.engine.reduction)


def own_of(recipe: Recipe, part: Literal["optim", "schedule"]) -> Any:
    """Return the user's class or function that the name of a section leads to; None where it is a shipped one."""
    name: str = getattr(recipe, part).name
    return own_member(name, f"{part}.name") if is_own_name(name) else None


def threads_per_replica(recipe: Recipe, topology: Topology | None) -> int:
    """Return the number of threads per replica: that of the recipe, or the value of `auto` on this host."""
    cores = topology.host_cores if topology and topology.host_cores else len(usable_cores())
    return resolve_threads(recipe.engine.threads, cores, recipe.batch.num_replicas * recipe.parallel.num_stages)
