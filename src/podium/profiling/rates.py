"""What limits a training here: three rates.

They tell input and arithmetic apart: samples delivered with nothing computed, updates computed over samples that
are in memory already, and both together as training has them. They are visited in turns, so that noise hits all alike.
"""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from podium.engine.update import Engine
from podium.training.build import Training
from podium.training.feeding import build_engine, samples_of_updates, updates_per_block
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

Samples = Iterator[dict[str, Tensor]]

#: so small that weights hardly change: what is measured must not overflow
SMALL_LR = 1e-6
_ROUNDS = 3
NUM_WARM_UP = 2
#: the slower of two must be slower by this to be called the bottleneck
_CLEARLY = 1.1


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
        make_updates(engine, itertools.repeat(held), count)
        return clock() - began

    ways: dict[str, Callable[[int], float]] = {
        "input": lambda count: _seconds_fed(training, _taken, count, clock),
        "compute": compute,
        "both": lambda count: _seconds_fed(training, partial(make_updates, engine), count, clock),
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


def make_updates(engine: Engine, samples: Samples, count: int) -> None:
    for update in range(count):
        engine.update(update, next(samples), SMALL_LR)
    engine.collect()  # waits for the device


def _updates_in(seconds: float, way: Callable[[int], float]) -> int:
    """Measure after a warm-up; double the work until it takes long enough to be timed."""
    way(NUM_WARM_UP)
    count = 1
    while (took := way(count)) < seconds / 8:
        count *= 2
    return max(2, math.ceil(count * seconds / took))
