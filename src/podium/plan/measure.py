"""Measures the parts of a training on this machine: short trainings, validation, a checkpoint, memory.

Trainings have one micro-batch in an update of an instance, and four, on one instance and on as many as the cores
carry: the difference is three further passes, which may take longer than the first one; the rest is the reduction on
the host, the optimiser and all that an update costs once. For plans with more instances than cores, also as many on
half of the cores: what it costs to take turns.
"""

import datetime
import math
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from podium.checkpoints.writing import Saver
from podium.plan.components import Components, HostTimes
from podium.plan.memory import estimated_bytes
from podium.plan.short_trainings import FEWEST_RECORDS, Moment, train_a_moment
from podium.recipe.loading import Recipe, recipe_with
from podium.topology import usable_cores
from podium.training.build import Training, build_training, threads_per_replica
from podium.training.evaluate import evaluate
from podium.training.feeding import build_engine, samples_of_updates
from podium.ui import console

_FEW, _MORE = 1, 4
#: trainings of each kind, if there is time for as many of this length
_ROUNDS, _SHORTEST_S = 3, 1.5
_NUM_WARM_UP, _NUM_TYPICAL = 3, 12
_VALID_BATCHES = 4
_LARGEST_JITTER = 0.5


def measure(recipe: Recipe, per_host: int, seconds: float) -> Components:
    """Measure for about `seconds` beside the starts of trainings; `per_host`: instances on a host at most."""
    cores = len(usable_cores())
    threads = threads_per_replica(recipe, None)
    training = build_training(recipe_with(recipe, _batch(recipe, 1, 1)), threads=threads)
    threads = training.placement.busy_threads
    update_s, jitter = _typical_update(training)  # compiles kernels, which trainings then find
    counts = [1]
    while 2 * counts[-1] <= per_host and 2 * counts[-1] * threads <= cores:
        counts.append(2 * counts[-1])
    kinds: list[tuple[int, Collection[int] | None]] = [(count, None) for count in counts]
    if os.name == "posix" and per_host > counts[-1] > 1:
        kinds.append((counts[-1], usable_cores()[: counts[-1] * threads // 2]))
    rounds = max(1, min(_ROUNDS, int(seconds / (2 * len(kinds) * _SHORTEST_S))))
    found = []
    with console.progress_display(what="measuring") as display:
        for place, (count, of_cores) in enumerate(kinds):
            where = "on half of the cores" if of_cores else ""
            display.update(place, len(kinds), {"instances": f"{count} {where}".rstrip()})
            visit_s = seconds / (2 * rounds * len(kinds))
            pass_s = update_s * max(1.0, count * threads / len(of_cores or usable_cores()))
            keys = {
                passes: {
                    **_passes(recipe, passes, count),
                    "engine.threads": threads,
                    "engine.updates_per_call": _updates_per_call(training, passes, visit_s, pass_s),
                }
                for passes in (_FEW, _MORE)
            }
            found.append(_host_times(recipe, keys, count, of_cores, rounds, visit_s))
    alone = {**_batch(recipe, 1, 1), "engine.threads": threads}
    model = training.state.model
    return Components(
        measured=datetime.date.today().isoformat(),
        num_cores=cores,
        threads=threads,
        times=dict(zip(counts, found, strict=False)),
        crowded=found[-1] if len(kinds) > len(counts) else None,
        jitter=jitter,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        memory_bytes=estimated_bytes(recipe_with(recipe, alone)),
        valid_s=_valid_seconds(training),
        save_s=_save_seconds(training),
        num_samples=len(training.task.train_source),
        num_valid_samples=min(
            len(training.task.valid_source), recipe.valid.max_samples or len(training.task.valid_source)
        ),
    )


def _batch(recipe: Recipe, accumulation: int, replicas: int) -> dict[str, object]:
    sizes = {"micro": recipe.batch.micro_batch, "accumulation": accumulation, "replicas": replicas}
    return {**{f"batch.{key}": value for key, value in sizes.items()}, "batch.scaling": "weak"}


def _host_times(
    recipe: Recipe,
    keys: Mapping[int, Mapping[str, object]],
    count: int,
    cores: Collection[int] | None,
    rounds: int,
    visit_s: float,
) -> HostTimes:
    """Return the times of `count` instances, from trainings of about `visit_s`; `keys`: by their passes."""
    moments: dict[int, list[Moment]] = {passes: [] for passes in keys}
    for _ in range(rounds):
        for passes, found in moments.items():
            found.append(train_a_moment(recipe, keys[passes], count, visit_s, cores))
    updates = {passes: [one.update_s for one in found] for passes, found in moments.items()}
    busy = {passes: [one.busy_s for one in found] for passes, found in moments.items()}
    every = [one for found in moments.values() for one in found]
    return HostTimes(
        *_divided(updates),
        max(_deviation(values) for values in updates.values()),
        *_divided(busy),
        statistics.median(one.startup_s for one in every),
        statistics.median(one.warm_up_s for one in every),
    )


def _passes(recipe: Recipe, passes: int, count: int) -> dict[str, object]:
    """Return the keys for so many passes in an update of each instance, of the kind that the recipe has."""
    if recipe.batch.num_accumulation > 1:
        return _batch(recipe, passes, count)
    return _batch(recipe, 1, passes * count)


def _updates_per_call(training: Training, passes: int, visit_s: float, pass_s: float) -> int:
    """Return after how many updates there is a record: as the recipe says, or as often as is needed to have enough."""
    recipe, total = training.recipe, training.task.lengths.total_updates
    within = int(visit_s / (FEWEST_RECORDS * passes * pass_s))
    return max(1, min(recipe.engine.updates_per_call, within, total // (FEWEST_RECORDS * passes)))


def _divided(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Return (seconds of an update with one micro-batch, of each further one)."""
    few, more = (statistics.median(seconds[passes]) for passes in (_FEW, _MORE))
    return few, max(0.0, more - few) / (_MORE - _FEW)


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms."""
    return statistics.stdev(map(math.log, values)) if len(values) > 1 else 0.0


def _typical_update(training: Training) -> tuple[float, float]:
    """Return (seconds of an update of this process, how much single ones scatter)."""
    took = []
    engine = build_engine(training)
    with samples_of_updates(training, 0, _NUM_WARM_UP + _NUM_TYPICAL) as samples:
        for update in range(_NUM_WARM_UP + _NUM_TYPICAL):
            began = time.perf_counter()
            engine.update(update, next(samples), 0.0)
            engine.collect()
            took.append(time.perf_counter() - began)
    typical = took[_NUM_WARM_UP:]
    return statistics.median(typical), min(_LARGEST_JITTER, _deviation(typical))


def _valid_seconds(training: Training) -> float:
    """Return the seconds that validation takes for a sample, in one instance."""
    section, source = training.recipe.valid, training.task.valid_source
    count = min(len(source), section.max_samples or len(source), _VALID_BATCHES * section.micro)

    def seconds(num_samples: int) -> float:
        began = time.perf_counter()
        evaluate(
            training.state.model,
            training.task.workload,
            source,
            micro_batch=section.micro,
            device=training.placement.device,
            max_samples=num_samples,
        )
        return time.perf_counter() - began

    seconds(min(count, section.micro))  # compiles kernels and reads the data
    return seconds(count) / count


def _save_seconds(training: Training) -> float:
    """Return how long a checkpoint holds the training up."""
    state = training.state
    with (
        tempfile.TemporaryDirectory(prefix="podium-plan-") as folder,
        Saver(Path(folder), training.recipe.checkpoint, None) as saver,
    ):
        for update in (1, 2):  # the second one reuses the memory of the first, as all later ones do
            saver.wait()
            began = time.perf_counter()
            saver.save(update, state.model, state.optimiser, state.state(), None)
            took = time.perf_counter() - began
    return took
