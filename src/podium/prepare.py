"""Everything a run needs, built from the recipe alone: nothing on disk is touched but the data that is read.

`train.py` begins with it; validation and prediction of a finished run do too.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from podium.averaging import WeightAverage
from podium.data.arrays import Source
from podium.engine.allocator import give_back_memory, keep_memory
from podium.engine.busy import busy_threads
from podium.engine.executables import Executable
from podium.engine.instances import Instances
from podium.engine.operators import apply_layout, resolve_layout
from podium.engine.precision import apply_precision
from podium.engine.randomness import seed_blocks, seed_torch
from podium.engine.recompute import apply_recompute
from podium.engine.sharded import Shares
from podium.engine.span import check_span, largest_span
from podium.engine.split import layers_of
from podium.engine.spread import SpreadModel, check_spread
from podium.errors import UserError
from podium.huggingface import start_from
from podium.optim.optimisers import Optimiser, build_optimiser
from podium.optim.scaling import scaled_lr
from podium.optim.schedules import Schedule, build_schedule
from podium.progress import Lengths
from podium.recipe import Recipe
from podium.topology import Topology, build_topology, resolve_device, resolve_threads, usable_cores
from podium.workloads.base import Workload, workload_class

if TYPE_CHECKING:  # loads torch's compiler with torch's pipelines, which takes long
    from podium.engine.pipeline import Pipeline
    from podium.staged import Cut


@dataclass
class Prepared:
    """Everything a run needs, built from the recipe alone."""

    recipe: Recipe
    workload: Workload
    samples: Source
    valid_samples: Source
    model: nn.Module
    optimiser: Optimiser
    schedule: Schedule
    topology: Topology
    instances: Instances
    device: torch.device
    #: of each replica, as recorded with the run
    threads: int
    #: of these, those that micro-batches are large enough for
    busy_threads: int
    lengths: Lengths
    #: of the weights, where the recipe asks for one
    average: WeightAverage | None = None
    #: once the first update has been made, where the recipe asks for compilation
    executable: Executable | None = None
    #: of the parameters, where each instance keeps optimiser state of its own alone
    shares: Shares | None = None
    #: where replicas are cut into stages: what this instance has to do with the others
    cut: "Cut | None" = None
    #: the model, once its parameters are spread over the instances; see `spread_parameters`
    spread: SpreadModel | None = None

    @property
    def local_replicas(self) -> range:
        """The replicas that this instance carries."""
        return self.topology.local_replicas(self.instances.index)

    @property
    def lead(self) -> bool:
        """Instance 0 alone speaks, and writes files; with stages, the others of its line write their checkpoints."""
        return self.instances.index == 0

    @property
    def pipeline(self) -> "Pipeline | None":
        return self.cut.pipeline if self.cut else None

    @property
    def line(self) -> Instances | None:
        """The instances that carry the stages of the same replicas."""
        return self.cut.pipeline.line if self.cut else None

    @property
    def peers(self) -> Instances:
        """The instances that carry other replicas: all of them, or those of the same stage."""
        return self.cut.peers if self.cut else self.instances

    @property
    def holders(self) -> Instances | None:
        """The instances, where each of them holds only a part of the state and a checkpoint needs all; else None."""
        return self.instances if self.recipe.parallel.shard != "none" and self.instances.count > 1 else None

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """Around whatever needs all weights. Collective where parameters are spread, else the model itself."""
        return nullcontext(self.model) if self.spread is None else self.spread.whole()


def prepare(
    recipe: Recipe,
    topology: Topology | None = None,
    instances: Instances | None = None,
    threads: int | None = None,
    data_of: Prepared | None = None,
    *,
    fresh: bool = False,
) -> Prepared:
    """Builds everything, touching no run folder: whatever is wrong with the recipe or the data shows here.

    `fresh`: the model gets the weights that the recipe starts from, where it names any. `data_of`: takes the samples of
    what was prepared before for the same workload, instead of opening them again.
    """
    device = resolve_device(recipe.engine.device)
    topology = topology or build_topology(recipe.batch.num_replicas)
    threads = threads or threads_per_replica(recipe, topology)
    torch.set_num_threads(threads)
    if recipe.parallel.shard == "parameters":
        give_back_memory()
    else:
        keep_memory()

    workload: Workload = workload_class(recipe.workload.name)(recipe.workload.model, recipe.workload.data)
    if data_of is None:
        samples, valid_samples = workload.source("train"), workload.source("valid")
    else:
        workload, samples, valid_samples = data_of.workload, data_of.samples, data_of.valid_samples
    global_batch = recipe.batch.global_batch
    updates_per_epoch = len(samples) // global_batch
    if updates_per_epoch == 0:
        raise UserError(
            f"there are {len(samples)} training samples, not enough for one update of {global_batch} "
            f"(micro-batch {recipe.batch.micro_batch} × accumulation {recipe.batch.num_accumulation} × "
            f"replicas {recipe.batch.num_replicas})"
        )
    total_updates = recipe.train.length.updates(updates_per_epoch=updates_per_epoch, global_batch=global_batch)
    if total_updates == 0:
        raise UserError(f"train.length = {recipe.train.length} is no update at all")

    seed_torch(device, "weights", recipe.seed)
    model = workload.build_model().train()
    if fresh and recipe.workload.init_from is not None:
        start_from(workload, model, recipe.workload.name, recipe.workload.init_from)
    if topology.num_stages == 1:  # else it is cut first
        model.to(device)
    blocks = [block for _, block in workload.stages(model)]
    layers = layers_of(blocks)
    if recipe.parallel.recompute:
        apply_recompute(blocks)
    if not recipe.engine.compile:  # compiled code draws in its own way, for the model as a whole
        seed_blocks(blocks, device)
    apply_layout(model, resolve_layout(recipe.engine.layout, device))
    apply_precision(recipe.precision, model)
    busy = threads
    if recipe.engine.threads == "auto" and device.type == "cpu":
        busy = busy_threads(threads, workload, model, recipe.batch.micro_batch)
        torch.set_num_threads(busy)
    check_span(largest_span(model), topology.num_replicas, topology.num_instances, recipe.engine.reduction)
    instances = instances or Instances.alone()
    cut = None
    if topology.num_stages > 1:
        from podium.staged import cut_model

        cut = cut_model(recipe, workload, model, layers, instances, device)
    shares, held = None, None
    if instances.count > 1 and recipe.parallel.shard == "optimiser":
        shares = Shares({name: param for name, param in model.named_parameters() if param.requires_grad}, instances)
        held = shares.own
    elif instances.count > 1 and recipe.parallel.shard == "parameters":
        scale = recipe.precision.loss_scale
        check_spread(model, recipe.engine.reduction, recipe.optim.name, recipe.engine.compile, scale)
        held = set()  # see `spread_parameters`
    optimiser = build_optimiser(recipe.optim, model, workload.param_groups(model), held)
    base_lr = scaled_lr(
        lr=recipe.optim.lr,
        lr_exponent=recipe.optim.lr_exponent,
        scale=recipe.optim.scale,
        base_batch=recipe.optim.base_batch,
        global_batch=global_batch,
    )
    schedule = build_schedule(recipe.schedule, base_lr, total_updates, updates_per_epoch, global_batch)
    return Prepared(
        recipe, workload, samples, valid_samples, model, optimiser, schedule, topology,
        instances, device, threads, busy, Lengths(updates_per_epoch, total_updates, global_batch),
        average=None if (method := recipe.average.method) == "none" else WeightAverage(method, recipe.average.decay),
        cut=cut,
        shares=shares,
    )  # fmt: skip


def spread_parameters(prepared: Prepared) -> None:
    """Collective. From here on no instance has all weights, where the recipe wants that (`parallel.shard`)."""
    recipe, model = prepared.recipe, prepared.model
    if recipe.parallel.shard != "parameters" or prepared.instances.count == 1 or prepared.spread is not None:
        return
    groups = prepared.workload.param_groups(model)
    blocks = [block for _, block in prepared.workload.stages(model)]
    prepared.spread = SpreadModel(model, blocks, prepared.instances)
    prepared.optimiser = build_optimiser(recipe.optim, prepared.spread.shards, groups)
    prepared.optimiser.rows = prepared.spread.shards.rows


def threads_per_replica(recipe: Recipe, topology: Topology | None) -> int:
    """As the recipe says, or what `auto` is on this host."""
    cores = topology.host_cores if topology and topology.host_cores else len(usable_cores())
    return resolve_threads(recipe.engine.threads, cores, recipe.batch.num_replicas * recipe.parallel.num_stages)
