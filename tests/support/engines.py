"""An engine for any small model, without a recipe."""

from collections.abc import Callable
from typing import Any

from torch import nn

from podium.distributed.instances import Instances
from podium.engine.parallelism import Replicated
from podium.engine.state import Lengths, Task, TrainState
from podium.engine.update import Engine, Events, UpdateOptions
from podium.optim.optimisers import Optimiser
from podium.optim.schedules import build_schedule
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.schedule import ScheduleSection


def small_engine(
    model: nn.Module,
    workload: Any,
    optimiser: Optimiser,
    batch: BatchSection,
    seed: int,
    *,
    clip_norm: float | None = None,
    instances: Instances | None = None,
    reduction: str = "exact",
    waited: Callable[[float], None] = lambda seconds: None,
) -> Engine:
    task = Task(workload, None, None, Lengths(1, 1, batch.global_batch))
    state = TrainState(model, optimiser, build_schedule(ScheduleSection(), 0.1, 1, 1, batch.global_batch))
    parallelism = Replicated(model, instances or Instances.alone(), reduction)
    return Engine(task, state, parallelism, UpdateOptions(batch, seed, clip_norm), Events(waited))
