"""What monitoring costs a training: the same recipe with `log.monitor` on and off, in turns.

    python -m bench.monitoring           several minutes; writes bench/results/monitoring.md
    python -m bench.monitoring --quick   to see that it works, not to measure

Each side is a whole training as a user runs it, in this process; its rate is that of its own records after the warm-up.
Sides change places from round to round, and ratios are taken within a round. Rates of single trainings scatter by more
than monitoring can cost, so what its thread does at each waking is timed, too: reading all counters, and writing the
file of an instance.

Last, how much longer an update takes under the profiler of `podium profile` than without, in turns.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.where import when_and_where
from podium.profiling.events import NUM_UPDATES, attribute, kernel_names, profile_updates
from podium.profiling.rates import make_updates
from podium.recipe.loading import Recipe, load_recipe, recipe_with
from podium.runs.folder import Run
from podium.runs.monitoring import EVERY_S, Monitoring
from podium.train import train
from podium.training.build import build_training
from podium.training.clock import Clock
from podium.training.feeding import build_engine, samples_of_updates
from podium.ui import console

RESULTS = Path(__file__).parent / "results" / "monitoring.md"
#: of the whole training; what has to be kept below
TARGET = 0.01
_CASES = {
    "neuron/quick": ("workload.data.source=generated", "workload.data.samples=8192"),
    "mnist": ("workload.data.source=generated", "batch.micro=16"),
}


def rate(recipe: Recipe, updates: int, warm_up: int, *, monitored: bool) -> float:
    """Return samples/s of a training of its own, after the warm-up."""
    keys = {"train.length": f"{warm_up + updates}up", "log.monitor": monitored}
    with tempfile.TemporaryDirectory(prefix="podium-monitoring-") as folder:
        records = train(recipe_with(recipe, keys), Path(folder) / "run").records()
    samples = seconds = 0.0
    for before, record in pairwise(records):
        if before["update"] >= warm_up:
            samples += record["samples"] - before["samples"]
            seconds += record["time/total_s"] - before["time/total_s"]
    return samples / seconds


def waking_ms(recipe: Recipe, times: int) -> list[float]:
    """Return the milliseconds of processor time that each waking of the thread takes."""
    found = []
    with tempfile.TemporaryDirectory(prefix="podium-monitoring-") as folder:
        monitoring = Monitoring(Run(Path(folder)), build_training(recipe), Clock())
        for _ in range(times):
            began = time.thread_time()
            monitoring._measure()
            monitoring._write(ended=False)
            found.append(1e3 * (time.thread_time() - began))
            time.sleep(0.01)
    return found


def compared(name: str, recipe: Recipe, rounds: int, seconds: float) -> str:
    """Measure a recipe in alternating rounds; return its row of the table."""
    per_call = recipe.engine.updates_per_call
    warm_up = 2 * per_call
    first = rate(recipe, 4 * per_call, warm_up, monitored=False)
    updates = per_call * math.ceil(seconds * first / recipe.batch.global_batch / per_call)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for monitored in (True, False) if number % 2 else (False, True):
            rates[monitored].append(rate(recipe, updates, warm_up, monitored=monitored))
        print(
            f"{name}, round {number + 1} of {rounds}: {rates[True][-1]:,.0f} on, {rates[False][-1]:,.0f} off",
            flush=True,
        )
    ratios = sorted(on / off for on, off in zip(rates[True], rates[False], strict=True))
    cost = 1 - statistics.median(ratios)
    middle = statistics.median(ratios)
    # of a median, from the median deviation: single rounds that something else disturbed do not count
    error = 1.253 * 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios) / math.sqrt(rounds)
    return (
        f"| {name} | {updates} | {statistics.median(rates[True]):,.0f} | {statistics.median(rates[False]):,.0f} "
        f"| {cost:+.2%} | {error:.2%} | {1 - ratios[-1]:+.1%} … {1 - ratios[0]:+.1%} |"
    )


def profiler_row(name: str, recipe: Recipe, rounds: int) -> str:
    """Measure updates with and without the profiler; return the row of the table."""
    training = build_training(recipe)
    engine = build_engine(training)
    kernels, device = kernel_names(), training.placement.device
    plain, profiled = [], []
    with samples_of_updates(training, 0, 2**31) as samples:
        make_updates(engine, samples, 5)
        for _ in range(rounds):
            began = time.perf_counter()
            make_updates(engine, samples, NUM_UPDATES)
            plain.append(1e3 * (time.perf_counter() - began) / NUM_UPDATES)
            found = attribute(profile_updates(training), training.state.model, device, kernels)
            profiled.append(found.update_us / 1e3)
    ratio = statistics.median(slow / fast for slow, fast in zip(profiled, plain, strict=True)) - 1
    return f"| {name} | {statistics.median(plain):.2f} | {statistics.median(profiled):.2f} | {ratio:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="What monitoring costs a training.")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one training")
    parser.add_argument("--quick", action="store_true", help="2 short rounds; writes nothing")
    options = parser.parse_args()
    rounds, seconds = (2, 0.3) if options.quick else (options.rounds, options.seconds)
    console.err.quiet = True
    load = os.getloadavg()[0]
    always = ("log.tensorboard=false", "log.report=false", "valid.every=1000ep", "checkpoint.every=1000ep")
    recipes = {name: load_recipe(name, [*keys, *always]) for name, keys in _CASES.items()}
    rows = [compared(name, recipe, rounds, seconds) for name, recipe in recipes.items()]
    slowed = [profiler_row(name, recipe, 2 if options.quick else 7) for name, recipe in recipes.items()]
    wakings = waking_ms(next(iter(recipes.values())), 20 if options.quick else 300)
    waking = statistics.median(wakings)
    text = "\n".join(
        (
            "# What monitoring costs",
            "",
            f"{when_and_where(load)}. Made by `python -m bench.monitoring`, whose first lines say what is compared; "
            f"{rounds} rounds. This machine has neither RAPL counters nor an accelerator: reading these is not in it.",
            "",
            "| recipe | updates | on, samples/s | off, samples/s | cost (median) | standard error | least … most |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"A waking of the thread takes {waking:.2f} ms of one core (median of {len(wakings)}; the slowest "
            f"{max(wakings):.2f} ms), every {EVERY_S:g} s: {waking / EVERY_S / 1e3:.3%} of that core. "
            f"Wanted: below {TARGET:.0%}.",
            "",
            "| recipe | ms per update | under the profiler | longer |",
            "|---|---|---|---|",
            *slowed,
            "",
        )
    )
    print(f"\n{text}")
    if not options.quick:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
