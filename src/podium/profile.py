"""`podium profile RECIPE`: what bounds a training here, and which operators its time goes to.

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

from podium import console
from podium.console import number
from podium.engine.update import Engine
from podium.errors import UserError
from podium.prepare import Prepared, prepare
from podium.recipe import load_recipe
from podium.table import Table
from podium.updates import build_engine, samples_of_updates, updates_per_block

Samples = Iterator[dict[str, Tensor]]

#: weights stay as they are but for this: what is measured must not run into infinities
_LR = 1e-6
_ROUNDS = 3
_NUM_WARM_UP = 2
#: the slower of two must be slower by this for one of them to be called the bound
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
        """What training would have to be rid of to be faster."""
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
    """Prints the three rates and, unless only these are wanted, the costliest operators; `trace` is a new file."""
    if trace is not None and trace.exists():
        raise UserError(f"{trace} is there already: choose another name")
    if trace is not None and not trace.parent.is_dir():
        raise UserError(f"--trace {trace}: there is no folder {trace.parent}")
    recipe = load_recipe(name, overrides)
    if recipe.parallel.num_stages > 1:
        raise UserError("profiles are of one instance, which carries no stages: give parallel.stages=1")
    prepared = prepare(recipe)
    with console.progress_display(what="profiling") as display:
        rates = measured_rates(prepared, seconds, display)
    console.show_table(rates.table(f"{name} on {prepared.busy_threads} of {prepared.threads} threads"))
    if not rates_only or trace is not None:
        console.show_table(operators_table(prepared, trace))
    if trace is not None:
        console.say(f"wrote {trace}: open it in a browser that has a trace viewer (chrome://tracing, ui.perfetto.dev)")


def measured_rates(prepared: Prepared, seconds: float, display: console.Display | None = None) -> Rates:
    """Medians of a few rounds of about `seconds` for each of the three."""
    display = display or console.NoDisplay()
    batch = prepared.recipe.batch
    engine = build_engine(prepared)
    with samples_of_updates(prepared, 0, 1) as samples:
        held = {field: tensor.clone() for field, tensor in next(samples).items()}

    def compute(count: int) -> float:
        began = time.perf_counter()
        _some_updates(engine, itertools.repeat(held), count)
        return time.perf_counter() - began

    ways: dict[str, Callable[[int], float]] = {
        "input": lambda count: _seconds_fed(prepared, _taken, count),
        "compute": compute,
        "both": lambda count: _seconds_fed(prepared, partial(_some_updates, engine), count),
    }
    counts = {what: _updates_in(seconds, way) for what, way in ways.items()}
    found: dict[str, list[float]] = {what: [] for what in ways}
    for visit in range(_ROUNDS * len(ways)):
        what = list(ways)[visit % len(ways)]
        display.update(visit, _ROUNDS * len(ways), {"trying": what})
        found[what].append(counts[what] * batch.global_batch / ways[what](counts[what]))
    rates = {what: statistics.median(values) for what, values in found.items()}
    return Rates(**rates, global_batch=batch.global_batch)


def _seconds_fed(prepared: Prepared, use: Callable[[Samples, int], None], count: int) -> float:
    """From a new feed, after its first block: what it has gathered ahead of time would be had for nothing."""
    with samples_of_updates(prepared, 0, 2**31) as samples:
        use(samples, updates_per_block(prepared))
        began = time.perf_counter()
        use(samples, count)
        return time.perf_counter() - began


def _taken(samples: Samples, count: int) -> None:
    deque(itertools.islice(samples, count), maxlen=0)


def _some_updates(engine: Engine, samples: Samples, count: int) -> None:
    for update in range(count):
        engine.update(update, next(samples), _LR)
    engine.collect()  # waits for the device


def _updates_in(seconds: float, way: Callable[[int], float]) -> int:
    """After a warm-up; doubles what is tried until it can be timed."""
    way(_NUM_WARM_UP)
    count = 1
    while (took := way(count)) < seconds / 8:
        count *= 2
    return max(2, math.ceil(count * seconds / took))


def operators_table(prepared: Prepared, trace: Path | None = None) -> Table:
    """Where the time of a few updates goes, by torch's own profiler; operators of Podium's have names there too."""
    engine = build_engine(prepared)
    device = prepared.device
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with samples_of_updates(prepared, 0, _NUM_WARM_UP + _PROFILED_UPDATES) as samples:
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
