"""Alternating rounds of several ways to read the same samples, and their table. Used by `bench.input`."""

import random
import statistics
import time
from collections.abc import Callable, Mapping

import psutil
from torch.utils.data import DataLoader, Dataset


def compared(
    what: str, sides: Mapping[str, Callable[[], float]], count: int, rounds: int, *, unit: str = "image"
) -> list[str]:
    """Measure the sides and return their table.

    `sides`: name -> reads all `count` samples once and returns the seconds; the others are compared with the first.
    Each reads all of them twice in a row, and the second time counts: the first finds caches and memory as another side
    left them, which happens only once in training.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    work: dict[str, list[float]] = {name: [] for name in sides}
    draw = random.Random(0)
    for number in range(rounds + 1):
        for name in draw.sample(list(sides), len(sides)):
            run = sides[name]
            run()
            before = _cpu_seconds()
            took = run()
            used = _cpu_seconds() - before
            if number:  # the first round starts workers and fills the system's cache
                seconds[name].append(took)
                work[name].append(used)
            print(f"{name}: {count / took:,.0f} {unit}s/s, {used / count * 1e3:.3f} ms of CPU each", flush=True)
    base = next(iter(seconds.values()))
    lines = [
        what,
        "",
        f"| input | {unit}s/s | least … most | against the DataLoader | CPU ms per {unit} |",
        "|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        rates = [count / value for value in values]
        ratio = statistics.median(b / a for a, b in zip(values, base, strict=True))
        spread = f"{min(rates):,.0f} … {max(rates):,.0f}"
        used = statistics.median(work[name]) / count * 1e3
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {spread} | {ratio:.2f} | {used:.3g} |")
    return lines


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its workers so far."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children(recursive=True)))


def loader_round(loader: DataLoader) -> float:
    """Return the seconds to read all samples, which are pairs, once."""
    began = time.perf_counter()
    count = sum(len(labels) for _, labels in loader)
    assert count == len(loader.dataset)  # type: ignore[arg-type]
    return time.perf_counter() - began


def started(samples: Dataset, batch: int, threads: int) -> DataLoader:
    """Return a loader whose worker processes are already running."""
    loader: DataLoader = DataLoader(
        samples, batch, shuffle=True, num_workers=threads, persistent_workers=True, prefetch_factor=4
    )
    loader_round(loader)
    return loader
