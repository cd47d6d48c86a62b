"""Measures the parts of a training on this machine: updates of real instances, validation, a checkpoint, memory.

Updates are timed with one micro-batch and with three, on one instance and on as many as the cores carry, in turns: the
difference is a pass, the rest is the reduction on the host, the optimiser and all that an update costs once. For plans
with more instances than cores, also as many on half of the cores: what it costs to take turns.
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
from podium.errors import UserError
from podium.plan.components import Components, HostTimes
from podium.recipe.loading import Recipe, recipe_with
from podium.topology import usable_cores
from podium.training.build import Training, build_training, threads_per_replica
from podium.training.evaluate import evaluate
from podium.training.feeding import build_engine, samples_of_updates
from podium.training.memory import estimate
from podium.tune.measure import MeasuringProcesses
from podium.ui import console

_FEW, _MORE = 1, 3
_ROUNDS = 5
_NUM_WARM_UP = 3
_TIMEOUT_S = 300.0
_VALID_BATCHES = 4
_LARGEST_JITTER = 0.5


def measure(name: str, overrides: Sequence[str], recipe: Recipe, per_host: int, seconds: float) -> Components:
    """Measure for about `seconds` beside the starts of processes; `per_host`: instances on a host at most."""
    cores = len(usable_cores())
    began = time.perf_counter()
    threads = threads_per_replica(recipe, None)
    training = build_training(recipe_with(recipe, _batch(recipe, 1, 1)), threads=threads)
    threads = training.placement.busy_threads
    estimate(training, enough=1 << 62)  # as every training does before its first update; compiles kernels
    startup_s = time.perf_counter() - began
    warm_up_s = _warm_up_seconds(training)
    memory = estimate(training)
    valid_s, save_s = _valid_seconds(training), _save_seconds(training)
    counts = [1]
    while 2 * counts[-1] <= per_host and 2 * counts[-1] * threads <= cores:
        counts.append(2 * counts[-1])
    crowds = os.name == "posix" and per_host > counts[-1] > 1
    visit_s = seconds / (2 * _ROUNDS * (len(counts) + crowds))
    times, jitter, crowded = {}, 0.0, None
    with console.progress_display(what="measuring") as display:
        for place, count in enumerate(counts):
            display.update(place, len(counts), {"instances": str(count)})
            found, scatter = _host_times(name, overrides, recipe, count, threads, visit_s)
            times[count] = found
            jitter = jitter or scatter
        if crowds:
            half = usable_cores()[: counts[-1] * threads // 2]
            crowded, _ = _host_times(name, overrides, recipe, counts[-1], threads, visit_s, half)
    model = training.state.model
    return Components(
        measured=datetime.date.today().isoformat(),
        num_cores=cores,
        threads=threads,
        times=times,
        crowded=crowded,
        jitter=jitter,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        memory_bytes=memory.total if memory else None,
        valid_s=valid_s,
        save_s=save_s,
        startup_s=startup_s,
        warm_up_s=warm_up_s,
        num_samples=len(training.task.train_source),
        num_valid_samples=min(
            len(training.task.valid_source), recipe.valid.max_samples or len(training.task.valid_source)
        ),
    )


def _batch(recipe: Recipe, accumulation: int, replicas: int) -> dict[str, object]:
    sizes = {"micro": recipe.batch.micro_batch, "accumulation": accumulation, "replicas": replicas}
    return {**{f"batch.{key}": value for key, value in sizes.items()}, "batch.scaling": "weak"}


def _host_times(
    name: str,
    overrides: Sequence[str],
    recipe: Recipe,
    count: int,
    threads: int,
    visit_s: float,
    cores: Collection[int] | None = None,
) -> tuple[HostTimes, float]:
    """Return the times of `count` instances, and how much single updates of one scatter."""
    processes = MeasuringProcesses(count, name, overrides, cores)
    means: dict[int, list[float]] = {_FEW: [], _MORE: []}
    busy: dict[int, list[float]] = {_FEW: [], _MORE: []}
    scatter = []
    try:
        for _ in range(_ROUNDS):
            for accumulation in means:
                keys = {**_batch(recipe, accumulation, count), "engine.threads": threads}
                found = processes.updates(keys, visit_s, _TIMEOUT_S)
                if found is None:
                    raise UserError(
                        f"updates with {accumulation} micro-batches on {count} instances could not be measured: "
                        "`podium train` says why"
                    )
                means[accumulation].append(max(statistics.fmean(one.seconds) for one in found))
                busy[accumulation].append(statistics.fmean(one.busy_s for one in found))
                scatter += [_deviation(one.seconds) for one in found]
    finally:
        processes.close()
    spread = max(_deviation(values) for values in means.values())
    times = HostTimes(*_divided(means), spread, *_divided(busy))
    return times, min(_LARGEST_JITTER, statistics.median(scatter))


def _divided(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Return (seconds of an update with one micro-batch, of each further one)."""
    few, more = (statistics.median(seconds[accumulation]) for accumulation in (_FEW, _MORE))
    return few, min(few, max(0.0, more - few) / (_MORE - _FEW))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms."""
    return statistics.stdev(map(math.log, values)) if len(values) > 1 else 0.0


def _warm_up_seconds(training: Training) -> float:
    """Return what the first updates take beyond that many later ones."""
    took = []
    engine = build_engine(training)
    with samples_of_updates(training, 0, 2 * _NUM_WARM_UP) as samples:
        for update in range(2 * _NUM_WARM_UP):
            began = time.perf_counter()
            engine.update(update, next(samples), 0.0)
            engine.collect()
            took.append(time.perf_counter() - began)
    return max(0.0, sum(took[:_NUM_WARM_UP]) - _NUM_WARM_UP * statistics.median(took[_NUM_WARM_UP:]))


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
