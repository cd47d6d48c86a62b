"""A model cut into stages: this instance keeps its own blocks and frees the rest. Called by `training/build.py`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from podium.contract import Workload
from podium.distributed.instances import Instances
from podium.distributed.lockstep import largest_span
from podium.distributed.pipeline.block_probe import BlockFacts, probe_blocks
from podium.distributed.pipeline.meta_blocks import free_blocks
from podium.distributed.pipeline.partition import Split, split_blocks
from podium.distributed.pipeline.runtime import Pipeline
from podium.distributed.pipeline.schedule import max_in_flight
from podium.errors import UserError
from podium.machine.device import move_module
from podium.optim.optimisers import grouped_names, num_slots
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.recipe.sections.parallel import ParallelSection
from podium.recipe.sections.precision import PrecisionSection
from podium.ui.table import Table

#: warn when a device has this many times the mean work
_UNEVEN = 1.5
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cut:
    """This instance's stage of the model, and how it works together with the others."""

    pipeline: Pipeline
    #: the instances that hold the same stage of other replicas
    data_group: Instances
    #: which block is on which device, one line per block
    allocation: list[str]
    table: Table
    #: set if the other devices have to wait for one of them
    warning: str | None


def cut_model(
    model: nn.Module,
    workload: Workload,
    layers: range,
    instances: Instances,
    device: torch.device,
    *,
    batch: BatchSection,
    parallel: ParallelSection,
    precision: PrecisionSection,
    optim: OptimSection,
    own_class: Any = None,
) -> Cut:
    """Keep the blocks of this instance's stage on its device and free the rest; `layers` are the blocks that
    `parallel.stages` counts. Collective.
    """
    named = workload.stages(model)
    names, blocks = [name for name, _ in named], [block for _, block in named]
    inside = {id(param) for block in blocks for param in block.parameters()}
    assert all(id(param) in inside for param in model.parameters()), "stages() must hold every parameter"
    num_stages = parallel.num_stages
    cpu = torch.device("cpu")
    inputs, facts = probe_blocks(workload, blocks, batch.micro_batch, precision, cpu)
    costs = [float(fact.products) for fact in facts]
    split = split_blocks(names, layers, parallel.stages, costs)
    order = [name for group in grouped_names(optim, model, workload.param_groups(model)).values() for name in group]
    in_flight = max_in_flight(parallel.schedule, num_stages, batch.num_accumulation)
    slots = num_slots(optim, own_class)
    memory = [_memory(split, blocks, facts, slots, device_, in_flight) for device_ in range(num_stages)]
    work = [sum(costs[block] for block in split.blocks_of(device_)) for device_ in range(num_stages)]
    warning = None
    if max(work) > _UNEVEN * sum(work) / num_stages:
        shown = ", ".join(f"device {number} {amount.total_megabytes:,.1f} MB" for number, amount in enumerate(memory))
        waiting = "the other device waits" if num_stages == 2 else f"the other {num_stages - 1} devices wait"
        warning = (
            f"device {work.index(max(work))} has {max(work) / sum(work):.0%} of the work, and {waiting} for it; "
            f"memory per stage: {shown}"
        )

    data_group, pipeline_group = instances.split_groups(num_stages)
    own = set(split.blocks_of(pipeline_group.index))
    free_blocks([block for number, block in enumerate(blocks) if number not in own])
    move_module(nn.ModuleList(blocks[number] for number in own), device)
    pipeline = Pipeline(
        model,
        blocks,
        workload,
        split,
        inputs,
        [fact.outputs for fact in facts],
        pipeline_group,
        micro_batch=batch.micro_batch,
        num_micro_batches=batch.num_accumulation,
        schedule=parallel.schedule,
        precision=precision,
        device=device,
        param_order=order,
    )
    return Cut(pipeline, data_group, split.lines(), _table(split, memory, work), warning)


def check_stages(model: nn.Module, *, compile: bool, reduction: str, shard: str) -> None:
    """Raise UserError where a recipe combines stages with something they do not support."""
    if compile:
        raise UserError("parallel.stages needs engine.compile=false: only whole models can be compiled")
    if reduction == "fast":
        raise UserError("parallel.stages needs engine.reduction=exact: fast supports whole models only")
    if shard != "none":
        raise UserError("parallel.stages needs parallel.shard=none: each stage already keeps only its own state")
    if largest_span(model) > 1:
        raise UserError("parallel.stages needs norm.span=1: replicas that share statistics need whole models")


@dataclass(frozen=True)
class _Memory:
    """The memory that training takes on one device, in bytes."""

    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total_megabytes(self) -> float:
        return (self.weights + self.gradients + self.optimiser + self.activations) / _MEGABYTE


def _memory(
    split: Split, blocks: list[nn.Module], facts: list[BlockFacts], slots: int, device: int, in_flight: int
) -> _Memory:
    """Return the memory that the parts on a device need in training; recomputation lowers that of activations."""
    own = split.blocks_of(device)
    params = {param for block in own for param in blocks[block].parameters()}
    weights = sum(param.numel() * param.element_size() for param in params)
    activations = in_flight * sum(facts[block].activation_bytes for block in own)
    return _Memory(weights, weights, weights * slots, activations)


def _table(split: Split, memory: list[_Memory], work: list[float]) -> Table:
    rows = []
    for device, amount in enumerate(memory):
        parts = [split.parts[part] for part in split.parts_of(device)]
        shown = [
            split.names[part[0]] if len(part) == 1 else f"{split.names[part[0]]} … {split.names[part[-1]]}"
            for part in parts
            if part
        ]
        numbers = (amount.weights, amount.gradients, amount.optimiser, amount.activations)
        row = [str(device), ", ".join(shown), f"{work[device] / max(1.0, sum(work)):.0%}"]
        rows.append([*row, *(f"{number / _MEGABYTE:,.1f}" for number in numbers)])
    columns = ["device", "blocks", "work", "weights", "gradients", "optimiser", "activations"]
    return Table("Stages", columns, rows, "estimates in MB, for the largest number of micro-batches in flight")
