"""How costs grow with size, each with the expected law and the measured exponent, and the other costs of a run.

    python -m bench.growth            about ten minutes; prints tables and writes bench/results/growth.md
    python -m bench.growth --quick    a minute; to see that it works, not to measure
    python -m bench.growth --only growth checkpoints

One thread. The sizes of a series are measured in turn, three times, and the best time of each counts: noise only slows.
Updates are counted in processor time, everything else in time that passes.
The exponent is the slope of log(cost) against log(size) over the upper half of the series.
"""

import argparse
import datetime
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from bench.where import when_and_where
from podium.checkpoints import reading
from podium.checkpoints import writing as saving
from podium.contract import by_dimension
from podium.data.feed import Feed
from podium.data.sample_order import order
from podium.data.sample_plan import train_blocks
from podium.data.sources.generated import GeneratedSource
from podium.optim.optimisers import build_optimiser
from podium.recipe.loading import load_recipe
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.training.build import build_training
from podium.tune.measure import measured_updates
from podium.ui import console
from podium.workloads.registry import workload_class

RESULTS = Path(__file__).parent / "results" / "growth.md"
PLAIN = ["workload.data.source=generated", "engine.threads=1", "valid.every=0", "schedule.warmup=0"]
Rows = list[list[str]]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope in a log-log plot over the upper half of the sizes."""
    half = len(sizes) // 2
    slope, _ = np.polyfit(np.log(sizes[half:]), np.log(costs[half:]), 1)
    return float(slope)


def best_of_visits(costs: Callable[[Any], float], sizes: Iterable[Any], visits: int = 3) -> list[float]:
    sizes = list(sizes)
    found = [math.inf] * len(sizes)
    for _ in range(visits):
        for index, size in enumerate(sizes):
            found[index] = min(found[index], costs(size))
    return found


def series(what: str, unit: str, law: str, sizes: Sequence[int], cost: Callable[[Any], float]) -> list[str]:
    costs = best_of_visits(cost, sizes)
    shown = ", ".join(f"{size:,}: {_seconds(value)}" for size, value in zip(sizes, costs, strict=True))
    row = [what, f"{shown} {unit}", law, f"{exponent(sizes, costs):.2f}"]
    print(" | ".join(row), flush=True)
    return row


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} µs"


# --- growth -----------------------------------------------------------------------------------------------------------


def update_seconds(*overrides: str, recipe: str = "mnist", seconds: float) -> float:
    """Return the seconds that processors spend on one update of a recipe with generated samples.

    Few updates of a long series' last sizes fit into a visit: the time that passes would show who else was running.
    """
    made = load_recipe(recipe, [*PLAIN, *overrides])
    return float(measured_updates(build_training(made), seconds)["busy"])


def growth(quick: bool) -> Rows:
    seconds = 0.2 if quick else 1.0
    top = 3 if quick else 6
    rows = [
        series(
            "update of mnist against micro-batch", "", "1", [8 * 2**n for n in range(top + 1)],
            lambda micro: update_seconds(f"batch.micro={micro}", seconds=seconds),
        ),
        series(
            "update of mnist (64) against the width of its convolutions", "", "1 … 2: one layer's inputs are fixed",
            [16 * 2**n for n in range(3 if quick else 4)],
            lambda width: update_seconds(f"workload.model.filters=[{width},{2 * width}]", seconds=seconds),
        ),
        series(
            "update of mnist (micro-batch 8) against replicas of one instance", "", "1", [2**n for n in range(top)],
            lambda count: update_seconds("batch.micro=8", f"batch.replicas={count}", seconds=seconds),
        ),
    ]  # fmt: skip
    counts = [10**n for n in range(3, 6 if quick else 8)]
    rows.append(series("order of 4,096 samples against samples in the set", "", "0", counts, order_seconds))
    rows.append(series("feed of 8,192 samples against samples in the set", "", "0", counts, feed_seconds))
    return rows


def order_seconds(num_samples: int) -> float:
    positions = np.arange(4096, dtype=np.int64) % num_samples
    began = time.perf_counter()
    for epoch in range(20):
        order(1, epoch, positions, num_samples)
    return (time.perf_counter() - began) / 20


def feed_seconds(num_samples: int) -> float:
    """Return the seconds from building a feed, through its blocks, to closing it."""
    recipe = load_recipe("mnist", [*PLAIN, "workload.data.generated_train=4096"])
    fields = workload_class("mnist")(recipe.workload.model, recipe.workload.data).source("train").fields
    source = GeneratedSource(fields, num_samples, ranges={"label": (0, 10)})
    batch = BatchSection(micro=128)
    total, per_block = 64, 1024
    blocks = train_blocks(
        seed=1, num_samples=num_samples, batch=batch, replicas=range(1), first_update=0, last_update=total,
        updates_per_block=min(per_block // 128, num_samples // 128),
    )  # fmt: skip
    began = time.perf_counter()
    with Feed(source, blocks, per_block) as feed:
        assert sum(len(block.samples) for block in feed) == total * 128
    return time.perf_counter() - began


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        # weights and the two moments of the optimiser
        self.layers = nn.ParameterList(torch.randn(num_bytes // 12 // 8) for _ in range(8))


def checkpoints(folder: Path, quick: bool) -> tuple[Rows, Rows]:
    """Return (growth with the size, GB/s against a plain copy)."""
    megabytes = [1, 4, 16, 64] if quick else [4, 16, 64, 256, 1024]
    kept: dict[int, tuple[nn.Module, Any]] = {}

    def made(size: int) -> tuple[nn.Module, Any]:
        if size not in kept:
            model = Weights(size << 20)
            section = OptimSection(name="adam", lr=1e-3)
            kept[size] = model, build_optimiser(section, model, by_dimension(model))
        return kept[size]

    def timed(action: Callable[[], object]) -> float:
        os.sync()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    def save(size: int) -> float:
        model, optimiser = made(size)
        return timed(lambda: saving.save(folder / str(size), 1, model, optimiser, {}))

    def restore(size: int) -> float:
        model, optimiser = made(size)
        return timed(lambda: reading.load(folder / str(size) / "update-00000001").restore(model, optimiser))

    def copy(size: int) -> float:
        """Return the seconds to read and write all files, until they are on the disk."""
        target = folder / "copy"
        shutil.rmtree(target, ignore_errors=True)
        found = timed(lambda: _copied(folder / str(size), target))
        shutil.rmtree(target)
        return found

    def library(size: int) -> float:
        """Return the seconds for the same bytes through the safetensors library, with a checksum."""
        import hashlib

        model, optimiser = made(size)
        weights = dict(model.state_dict())
        moments = {f"{i}/{j}": t for i, s in enumerate(optimiser.slot_lists[0]) for j, t in enumerate(s)}

        def write() -> None:
            for name, tensors in (("a", weights), ("b", moments)):
                data = safetensors.torch.save(tensors)
                hashlib.sha256(data).hexdigest()
                with (folder / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

        found = timed(write)
        (folder / "a").unlink()
        (folder / "b").unlink()
        return found

    growing = [
        series("checkpoint saved, against its megabytes", "", "1", megabytes, save),
        series("checkpoint restored, against its megabytes", "", "1", megabytes, restore),
    ]
    size = megabytes[-2]
    rates: Rows = []
    actions = {"saved": save, "restored": restore, "plain copy of its files": copy, "saved by the library": library}
    best = dict.fromkeys(actions, math.inf)
    for _ in range(5):
        for name, action in actions.items():
            best[name] = min(best[name], action(size))
    for name, seconds in best.items():
        ratio = best["plain copy of its files"] / seconds
        rates.append([name, f"{size} MB", f"{(size << 20) / seconds / 1e9:.2f} GB/s", f"{ratio:.2f}"])
        print(" | ".join(rates[-1]), flush=True)
    return growing, rates


def _copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def stall(folder: Path, quick: bool) -> Rows:
    """Measure how long training is delayed by a checkpoint that is written in the background.

    neuron/full, with alternating stretches with and without a checkpoint in the same run, by the wall clock. Besides
    the writing, which takes time from the training if all cores are busy, a checkpoint stops it for a copy of the
    weights and one check of them.
    """
    rows: Rows = []
    per_stretch, num_pairs = (4, 2) if quick else (12, 24)
    for threads in (1, len(os.sched_getaffinity(0))):
        out = folder / f"stall-{threads}"
        run_podium(
            "neuron/full", f"engine.threads={threads}", "workload.data.samples=6144", "batch.micro=64",
            f"train.length={2 * per_stretch * (num_pairs + 1)}up", f"checkpoint.every={2 * per_stretch}up",
            "checkpoint.best=false", f"engine.updates_per_call={per_stretch}", "log.report=false", "valid.every=0",
            "valid.max_samples=8", out=out,
        )  # fmt: skip
        lines = (out / "metrics.jsonl").read_text().splitlines()
        ended = [json.loads(line)["time/total_s"] for line in lines]
        took = [after - before for before, after in pairwise(ended)]
        # record 2 is followed by the first checkpoint; the last stretch ends with another, and with the run
        pairs = list(zip(took[1::2], took[2::2], strict=False))
        lost = statistics.median(saving - not_saving for saving, not_saving in pairs)
        apart = statistics.median(saving + not_saving for saving, not_saving in pairs)
        rows.append(
            [
                f"neuron/full, threads: {threads}, a checkpoint (35 MB) in {2 * per_stretch} updates ({apart:.1f} s)",
                f"{1000 * lost:.0f} ms",
                f"{100 * lost / apart:.1f} %",
                f"{100 * lost / 60:.2f} %",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


# --- a run's other costs ----------------------------------------------------------------------------------------------


def run_podium(recipe: str, *overrides: str, out: Path) -> None:
    command = [sys.executable, "-m", "podium", "train", recipe, *PLAIN, *overrides, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)


def memory(folder: Path, quick: bool) -> Rows:
    """Measure the peak memory of a whole run of each workload, and how much more a run four times as long needs."""
    rows: Rows = []
    for recipe, micro in (("mnist", 64), ("neuron/full", 192)):
        peaks = []
        for num_updates in (5, 20) if quick else (25, 100):
            out = folder / f"memory-{time.monotonic_ns()}"
            script = (
                "import re; from pathlib import Path; from podium.cli import main\n"
                "try: main()\n"  # not getrusage, which starts from the peak of the parent process
                "finally: print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
            )
            args = [*PLAIN, f"batch.micro={micro}", f"train.length={num_updates}up", "valid.max_samples=8",
                    "log.report=false", "--out", str(out)]  # fmt: skip
            ended = subprocess.run(
                [sys.executable, "-c", script, "train", recipe, *args], check=True, capture_output=True, text=True
            )
            peaks.append(int(ended.stdout.split()[-1]) / 1024)
        rows.append([f"{recipe}, micro-batch {micro}", f"{peaks[0]:,.0f} MB", f"{peaks[1] - peaks[0]:+,.0f} MB"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def start_up(folder: Path) -> Rows:
    """Measure the seconds until a user sees something."""
    podium = [sys.executable, "-m", "podium"]
    rows: Rows = []
    for name, command in (("`podium --help`", ["--help"]), ("`podium recipes`", ["recipes"])):
        times = []
        for _ in range(7):
            began = time.perf_counter()
            subprocess.run([*podium, *command], check=True, capture_output=True)
            times.append(time.perf_counter() - began)
        rows.append([name, f"{sorted(times)[3]:.2f} s ({min(times):.2f} … {max(times):.2f})"])
        print(" | ".join(rows[-1]), flush=True)
    times = []
    for _ in range(5):
        out = folder / f"start-{time.monotonic_ns()}"
        args = ["train", "mnist", "workload.data.source=generated", "train.length=1up", "engine.updates_per_call=1",
                "valid.max_samples=8", "log.report=false", "--out", str(out)]  # fmt: skip
        began = time.perf_counter()
        with subprocess.Popen([*podium, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            metrics = out / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
                time.sleep(0.005)
            times.append(time.perf_counter() - began)
    rows.append(["first update of mnist recorded", f"{sorted(times)[2]:.2f} s ({min(times):.2f} … {max(times):.2f})"])
    print(" | ".join(rows[-1]), flush=True)
    return rows


def telemetry(folder: Path, quick: bool) -> Rows:
    """Measure the share of time that records, TensorBoard and the progress display take, by timing their calls.

    Also without the first call of each, since that loads the modules that write TensorBoard's files.
    """
    from podium.runs import metrics as module
    from podium.train import train
    from podium.ui.console import PlainDisplay

    spent: list[float] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        return call

    module.Telemetry.write = counted(module.Telemetry.write)  # type: ignore[method-assign]
    PlainDisplay.update = counted(PlainDisplay.update)  # type: ignore[method-assign]
    rows: Rows = []
    for micro in (8, 64):
        spent.clear()
        length = f"train.length={200 if quick else 2000}up"
        recipe = load_recipe("mnist", [*PLAIN, f"batch.micro={micro}", length, "log.report=false"])
        out = folder / f"telemetry-{micro}"
        train(recipe, out)
        seconds = json.loads((out / "summary.json").read_text())["seconds"]["train"]
        whole, later = (f"{100 * sum(times) / seconds:.2f} %" for times in (spent, sorted(spent)[:-1]))
        rows.append([f"mnist, micro-batch {micro}, as installed", whole, later])
        print(" | ".join(rows[-1]), flush=True)
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Rows) -> list[str]:
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def replaced(page: str, lines: list[str]) -> str:
    """Return a page with some of its tables replaced by newer ones, each with the time it was made."""
    sections = page.split("\n## ")
    for newer in "\n".join(["", *lines]).split("\n## ")[1:]:
        title, _, rest = newer.partition("\n")
        dated = f"{title}\n\n{datetime.datetime.now():%Y-%m-%d %H:%M}.\n{rest}"
        sections = [dated if section.partition("\n")[0] == title else section for section in sections]
    return "\n## ".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parts = ["growth", "checkpoints", "stall", "memory", "start-up", "telemetry"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick, load = options.quick, os.getloadavg()[0]
    law = ("what", "cost", "exponent expected", "measured")
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="podium-growth-") as name:
        folder = Path(name)
        console.keep_log(folder / "log")
        if "start-up" in options.only:
            lines += table("Start-up", ("until", "median of 5 or 7 (least … most)"), start_up(folder))
        growing = growth(quick) if "growth" in options.only else []
        if "checkpoints" in options.only:
            more, rates = checkpoints(folder, quick)
            growing += more
            lines += table("Checkpoints (best of 5, in turns)", ("what", "size", "rate", "against a copy"), rates)
        if growing:
            lines = [*table("Growth", law, growing), *lines]
        if "stall" in options.only:
            lines += table(
                "Saving beside training (median of 24 stretches with a checkpoint against the next one without)",
                ("run", "held up by a checkpoint", "of the time", "with one a minute"),
                stall(folder, quick),
            )
        if "memory" in options.only:
            head = ("run", "peak of 25 updates", "100 updates need more")
            lines += table("Peak memory", head, memory(folder, quick))
        if "telemetry" in options.only:
            lines += table(
                "Records and progress", ("run", "share of the time", "without the slowest"), telemetry(folder, quick)
            )
    opening = [
        "# Growth and cost",
        "",
        f"{when_and_where(load)}. One thread. Made by `python -m bench.growth`.",
        "",
    ]
    text = "\n".join([*opening, *lines])
    print(text)
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        if options.only != parts:  # replaces these tables and keeps the others
            text = replaced(RESULTS.read_text(encoding="utf-8"), lines)
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
