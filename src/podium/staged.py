"""A model cut into stages: this instance keeps its own blocks and lets go of the rest. Called by `prepare.py`."""

from dataclasses import dataclass

import torch
from torch import nn

from podium.engine.blocks import BlockFacts, look_at_blocks
from podium.engine.instances import Instances
from podium.engine.pipeline import Pipeline
from podium.engine.pipeline_order import max_in_flight
from podium.engine.span import largest_span
from podium.engine.split import Split, split_blocks
from podium.errors import UserError
from podium.held import let_go
from podium.optim.optimisers import OptimSection, grouped_names, num_slots
from podium.recipe import Recipe
from podium.table import Table
from podium.workloads.base import Workload

#: a device with so many times the work of the mean one holds the others up
_UNEVEN = 1.5
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cut:
    """What is left of the model here, and how it works together with the rest."""

    pipeline: Pipeline
    #: those that carry the same stage of other replicas
    peers: Instances
    #: which block is on which device, a line each
    allocation: list[str]
    table: Table
    #: where one device holds the others up
    warning: str | None


def cut_model(
    recipe: Recipe, workload: Workload, model: nn.Module, layers: range, instances: Instances, device: torch.device
) -> Cut:
    """Keeps the blocks of this instance's stage on its device; `layers` are those of the blocks that are counted.

    Collective: all instances call it together.
    """
    _check_possible(recipe, model)
    named = workload.stages(model)
    names, blocks = [name for name, _ in named], [block for _, block in named]
    inside = {id(param) for block in blocks for param in block.parameters()}
    assert all(id(param) in inside for param in model.parameters()), "stages() must hold every parameter"
    batch, section, num_stages = recipe.batch, recipe.parallel, recipe.parallel.num_stages
    cpu = torch.device("cpu")
    inputs, facts = look_at_blocks(workload, blocks, batch.micro_batch, recipe.precision, cpu)
    costs = [float(fact.products) for fact in facts]
    split = split_blocks(names, layers, section.stages, costs)
    order = [
        name for group in grouped_names(recipe.optim, model, workload.param_groups(model)).values() for name in group
    ]
    in_flight = max_in_flight(section.schedule, num_stages, batch.num_accumulation)
    memory = [_memory(split, blocks, facts, recipe.optim, device_, in_flight) for device_ in range(num_stages)]
    work = [sum(costs[block] for block in split.blocks_of(device_)) for device_ in range(num_stages)]
    warning = None
    if max(work) > _UNEVEN * sum(work) / num_stages:
        told = ", ".join(f"device {number} {amount.total_megabytes:,.1f} MB" for number, amount in enumerate(memory))
        warning = (
            f"device {work.index(max(work))} has {max(work) / sum(work):.0%} of the work, and the other "
            f"{num_stages - 1} wait for it; memory per stage: {told}"
        )

    peers, line = instances.divided(num_stages)
    own = set(split.blocks_of(line.index))
    let_go([block for number, block in enumerate(blocks) if number not in own])
    for number in own:
        blocks[number].to(device)
    pipeline = Pipeline(
        model,
        blocks,
        workload,
        split,
        inputs,
        [fact.outputs for fact in facts],
        line,
        micro_batch=batch.micro_batch,
        num_micro_batches=batch.num_accumulation,
        schedule=section.schedule,
        precision=recipe.precision,
        device=device,
        param_order=order,
    )
    return Cut(pipeline, peers, split.lines(), _table(split, memory, work), warning)


def _check_possible(recipe: Recipe, model: nn.Module) -> None:
    if recipe.engine.compile:
        raise UserError("parallel.stages goes with engine.compile=false: only whole models are compiled")
    if recipe.engine.reduction == "fast":
        raise UserError("parallel.stages goes with engine.reduction=exact: fast knows whole models only")
    if recipe.parallel.shard != "none":
        raise UserError("parallel.stages goes with parallel.shard=none: each stage keeps only its own state already")
    if largest_span(model) > 1:
        raise UserError("parallel.stages goes with norm.span=1: replicas that share statistics run on whole models")


@dataclass(frozen=True)
class _Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total_megabytes(self) -> float:
        return (self.weights + self.gradients + self.optimiser + self.activations) / _MEGABYTE


def _memory(
    split: Split, blocks: list[nn.Module], facts: list[BlockFacts], section: OptimSection, device: int, in_flight: int
) -> _Memory:
    """What the parts of a device take in training; with recomputation, less for activations."""
    own = split.blocks_of(device)
    params = {param for block in own for param in blocks[block].parameters()}
    weights = sum(param.numel() * param.element_size() for param in params)
    activations = in_flight * sum(facts[block].activation_bytes for block in own)
    return _Memory(weights, weights, weights * num_slots(section), activations)


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
    return Table("Stages", columns, rows, "MB as computed, for as many micro-batches as are under way at a time")
