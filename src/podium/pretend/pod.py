"""What a pod would be: its counts, lengths, learning rates, order and bytes, checked as the pod would check them.

Everything here is computed with the recipe's own numbers; nothing is trained, and no other process is started.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from podium.contract import Workload
from podium.distributed.lockstep import check_span
from podium.distributed.pipeline.schedule import actions
from podium.distributed.sharding.fully_sharded import check_equal_blocks
from podium.engine.state import Lengths
from podium.errors import UserError
from podium.optim.lr_scaling import scaled_lr
from podium.optim.schedules import Schedule, build_schedule
from podium.pretend.model_bytes import Anatomy, anatomy
from podium.recipe.loading import Recipe
from podium.topology import Topology
from podium.training.build import build_task, check_audit, check_graph


@dataclass(frozen=True)
class Pod:
    """A pod as its recipe says, with nothing left out that it would refuse before its first update."""

    recipe: Recipe
    topology: Topology
    workload: Workload
    num_samples: int
    lengths: Lengths
    lr: float
    schedule: Schedule
    anatomy: Anatomy | None
    #: why the model's bytes are not known
    unknown: str = ""


def build_pod(recipe: Recipe, topology: Topology, own: dict[str, Any]) -> Pod:
    """Check the counts of a pod, open its samples, and find what its model takes; raise UserError as the pod would.
    `own`: the user's optimiser and schedule, by the name of their section."""
    span = recipe.blocks.span
    check_audit(recipe, span)
    task = build_task(recipe)
    check_graph(recipe, torch.device("cuda"), topology.num_instances, span, task)  # the small form runs without
    lengths, num_blocks = task.lengths, topology.num_instances // topology.num_stages
    check_span(span, topology.num_replicas, num_blocks, recipe.engine.reduction)
    if recipe.parallel.shard == "parameters":
        check_equal_blocks(topology.num_replicas, num_blocks)
    optim = recipe.optim
    lr = scaled_lr(
        lr=optim.lr,
        lr_exponent=optim.lr_exponent,
        scale=optim.scale,
        base_batch=optim.base_batch,
        global_batch=recipe.batch.global_batch,
    )
    schedule = build_schedule(
        recipe.schedule, lr, lengths.total_updates, lengths.updates_per_epoch, lengths.global_batch, own["schedule"]
    )
    _check_order(recipe)
    found, unknown = None, ""
    try:
        found = anatomy(recipe, task.workload, topology.num_instances, own["optim"])
    except UserError:
        raise
    except Exception as error:  # a user's model may read values, which it has none of here
        unknown = f"the model does not run without its memory ({type(error).__name__})"
    return Pod(recipe, topology, task.workload, len(task.train_source), lengths, lr, schedule, found, unknown)


def _check_order(recipe: Recipe) -> None:
    """Make the order of all micro-batches of an update, which a pipeline follows, and see that it is whole."""
    num_stages, num_micro_batches = recipe.parallel.num_stages, recipe.batch.num_accumulation
    if num_stages > 1:
        orders = actions(recipe.parallel.schedule, num_stages, num_micro_batches)
        made = {action for order in orders for action in order}
        assert len(made) == sum(map(len, orders)) == 2 * (num_stages + 1) * num_micro_batches


def rates(pod: Pod) -> Sequence[tuple[int, float]]:
    """Return the updates at which the learning rate is shown, with it: the first ones, the end of the warm-up, the
    middle, the last."""
    total, warmup = pod.lengths.total_updates, pod.schedule.warmup_updates
    places = sorted({0, min(warmup, total - 1), total // 2, total - 1})
    return [(place, pod.schedule.lr(place)) for place in places]
