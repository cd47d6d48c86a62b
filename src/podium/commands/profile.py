"""`podium profile RECIPE`: what limits a training here, and which operators take its time.

Three rates tell input and arithmetic apart: samples delivered with nothing computed, updates computed over samples that
are in memory already, and both together as training has them. They are visited in turns, so that noise hits all alike.
"""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from podium.engine.update import Engine
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.training.build import Training, build_training
from podium.training.feeding import build_engine, samples_of_updates, updates_per_block
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

Samples = Iterator[dict[str, Tensor]]

#: so small that weights hardly change: what is measured must not overflow
_LR = 1e-6
_ROUNDS = 3
_NUM_WARM_UP = 2
#: the slower of two must be slower by this to be called the bottleneck
_CLEARLY = 1.1
_PROFILED_UPDATES, _ROWS = 5, 15


@dataclass(frozen=True)
class Rates:
    """Samples per second of one instance; `global_batch` of them make an update."""

    input: float
    compute: float
    both: float
    global_batch: int

    @property
    def bottleneck(self) -> str:
        """Return what limits the training: input, compute, or both alike."""
        if max(self.input, self.compute) < _CLEARLY * min(self.input, self.compute):
            return "input and compute alike"
        return "input" if self.input < self.compute else "compute"

    def table(self, title: str) -> Table:
        def row(what: str, rate: float) -> list[str]:
            return [what, number(rate), number(1e3 * self.global_batch / rate)]

        slower = min(self.input, self.compute)
        return Table(
            title,
            ["", "samples/s", "ms per update"],
            [row("input only", self.input), row("compute only", self.compute), row("both together", self.both)],
            f"bottleneck: {self.bottleneck}; together {100 * self.both / slower:.0f} % of the slower one",
        )


def run_profile(
    name: str, overrides: Sequence[str], *, rates_only: bool = False, trace: Path | None = None, seconds: float = 3.0
) -> None:
    """Print the three rates and, unless only these are wanted, the costliest operators; `trace` is a new file."""
    if trace is not None and trace.exists():
        raise UserError(f"{trace} already exists: choose another name")
    if trace is not None and not trace.parent.is_dir():
        raise UserError(f"--trace {trace}: the folder {trace.parent} does not exist")
    recipe = load_recipe(name, overrides)
    if recipe.parallel.num_stages > 1:
        raise UserError("a profile is of one instance, which cannot be split into stages: add parallel.stages=1")
    training = build_training(recipe)
    with console.progress_display(what="profiling") as display:
        rates = measured_rates(training, seconds, display)
    console.show_table(
        rates.table(f"{name} on {training.placement.busy_threads} of {training.placement.threads} threads")
    )
    if not rates_only or trace is not None:
        console.show_table(operators_table(training, trace))
    if trace is not None:
        console.say(f"wrote {trace}: open it in a browser that has a trace viewer (chrome://tracing, ui.perfetto.dev)")


def measured_rates(
    training: Training,
    seconds: float,
    display: console.Display | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure each of the three for a few rounds of about `seconds`, and return the medians."""
    display = display or console.NoDisplay()
    batch = training.recipe.batch
    engine = build_engine(training)
    with samples_of_updates(training, 0, 1) as samples:
        held = {field: tensor.clone() for field, tensor in next(samples).items()}

    def compute(count: int) -> float:
        began = clock()
        _some_updates(engine, itertools.repeat(held), count)
        return clock() - began

    ways: dict[str, Callable[[int], float]] = {
        "input": lambda count: _seconds_fed(training, _taken, count, clock),
        "compute": compute,
        "both": lambda count: _seconds_fed(training, partial(_some_updates, engine), count, clock),
    }
    counts = {what: _updates_in(seconds, way) for what, way in ways.items()}
    found: dict[str, list[float]] = {what: [] for what in ways}
    for visit in range(_ROUNDS * len(ways)):
        what = list(ways)[visit % len(ways)]
        display.update(visit, _ROUNDS * len(ways), {"trying": what})
        found[what].append(counts[what] * batch.global_batch / ways[what](counts[what]))
    rates = {what: statistics.median(values) for what, values in found.items()}
    return Rates(**rates, global_batch=batch.global_batch)


def _seconds_fed(
    training: Training, use: Callable[[Samples, int], None], count: int, clock: Callable[[], float]
) -> float:
    """Measure a new feed after its first block, as what was gathered ahead of time would cost nothing."""
    with samples_of_updates(training, 0, 2**31) as samples:
        use(samples, updates_per_block(training))
        began = clock()
        use(samples, count)
        return clock() - began


def _taken(samples: Samples, count: int) -> None:
    deque(itertools.islice(samples, count), maxlen=0)


def _some_updates(engine: Engine, samples: Samples, count: int) -> None:
    for update in range(count):
        engine.update(update, next(samples), _LR)
    engine.collect()  # waits for the device


def _updates_in(seconds: float, way: Callable[[int], float]) -> int:
    """Measure after a warm-up; double the work until it takes long enough to be timed."""
    way(_NUM_WARM_UP)
    count = 1
    while (took := way(count)) < seconds / 8:
        count *= 2
    return max(2, math.ceil(count * seconds / took))


def operators_table(training: Training, trace: Path | None = None) -> Table:
    """Return where the time of a few updates goes, by torch's profiler, which also names Podium's own operators."""
    engine = build_engine(training)
    device = training.placement.device
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with samples_of_updates(training, 0, _NUM_WARM_UP + _PROFILED_UPDATES) as samples:
        _some_updates(engine, samples, _NUM_WARM_UP)
        with profile(activities=kinds) as profiled:
            began = time.perf_counter()
            _some_updates(engine, samples, _PROFILED_UPDATES)
            took_ms = 1e3 * (time.perf_counter() - began) / _PROFILED_UPDATES
    if trace is not None:
        profiled.export_chrome_trace(str(trace))

    def own_ms(event: FunctionEventAvg) -> float:
        on_device = event.self_device_time_total if device.type != "cpu" else event.self_cpu_time_total
        return float(on_device) / 1e3 / _PROFILED_UPDATES

    ranked = sorted(profiled.key_averages(), key=own_ms, reverse=True)[:_ROWS]
    total = sum(own_ms(event) for event in profiled.key_averages())
    rows = [
        [event.key, number(event.count / _PROFILED_UPDATES), number(own_ms(event)), f"{own_ms(event) / total:.1%}"]
        for event in ranked
        if own_ms(event) > 0
    ]
    return Table(
        "where the time goes",
        ["operator", "calls per update", "ms per update", "share"],
        rows,
        f"an update took {number(took_ms)} ms under the profiler, which slows it",
    )
