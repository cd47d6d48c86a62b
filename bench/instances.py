"""Samples per second and weights on 1, 2, 4 and 8 instances, and how long a run takes to go on after a kill.

    python -m bench.instances            several minutes; prints tables and writes bench/results/instances.md

Every row is `podium train … --instances N` in processes of its own, one thread per replica, rows in turns over the
rounds. The rate is that of the run's own records without the first, over the whole run; the weights must agree. What
the machine itself has to give is shown by two runs of one instance side by side, each on a core of its own, which have
nothing to do with each other.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "instances.md"
CASES = {
    "neuron/full": [
        "workload.data.source=generated",
        "workload.data.samples=6144",
        "batch.micro=192",
        "train.length=8up",
        "engine.updates_per_call=2",
    ],
    "mnist": ["workload.data.source=generated", "batch.micro=16", "train.length=120up", "engine.updates_per_call=4"],
}
PLAIN = ["batch.replicas=8", "engine.threads=1", "valid.every=0", "valid.max_samples=8",
         "checkpoint.every=0", "log.report=false", "log.tensorboard=false", "schedule.warmup=0"]  # fmt: skip


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "podium", *map(str, args)]


def rate(recipe: str, num_instances: int, folder: Path) -> tuple[float, str]:
    """(samples per second, sha256 of the weights) of one run."""
    with started(recipe, num_instances, folder / f"{time.monotonic_ns()}") as run:
        pass
    return result(run)


def rate_apart(recipe: str, folder: Path) -> float:
    """Samples per second of two runs of one instance, side by side, added."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    outs = [folder / f"{time.monotonic_ns()}-{core}" for core in cores]
    with started(recipe, 1, outs[0], cores[0]) as first, started(recipe, 1, outs[1], cores[1]) as second:
        pass
    return result(first)[0] + result(second)[0]


def started(recipe: str, num_instances: int, out: Path, core: int | None = None) -> subprocess.Popen[bytes]:
    args = command("train", recipe, *CASES[recipe], *PLAIN, "--instances", num_instances, "--out", out)
    process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    return process


def result(run: subprocess.Popen[bytes]) -> tuple[float, str]:
    """(samples per second, sha256 of the weights) of a run that has ended."""
    assert run.returncode == 0, run.args
    assert isinstance(run.args, list)
    out = Path(str(run.args[-1]))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = samples = 0.0
    for before, record in pairwise(records):
        samples += record["samples"] - before["samples"]
        seconds += (record["samples"] - before["samples"]) / record["train/samples_per_second"]
    return samples / seconds, json.loads((out / "summary.json").read_text())["weights_sha256"]


def seconds_after_kill(folder: Path) -> tuple[float, float]:
    """(until the launcher says so, until the next update is recorded) after SIGKILL of one instance of two."""
    out = folder / f"{time.monotonic_ns()}"
    args = ["train", "mnist", *CASES["mnist"], *PLAIN, "train.length=400up", "checkpoint.every=20up",
            "engine.updates_per_call=1", "--instances", 2, "--out", out]  # fmt: skip
    metrics = out / "metrics.jsonl"

    def newest() -> int:
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        return json.loads(lines[-1])["update"] if lines and lines[-1].endswith(b"}") else 0

    with (folder / "err").open("w+b") as errors, subprocess.Popen(command(*args), stderr=errors) as launcher:
        while newest() < 50:
            time.sleep(0.01)
        child = psutil.Process(launcher.pid).children(recursive=True)[-1]
        killed = time.perf_counter()
        child.kill()
        while b"starting anew" not in (folder / "err").read_bytes():
            time.sleep(0.01)
        told, before = time.perf_counter() - killed, newest()
        while newest() >= before:  # the records of lost updates are dropped on resume
            time.sleep(0.01)
        resumed_from = newest()
        while newest() <= resumed_from:
            time.sleep(0.01)
        again = time.perf_counter() - killed
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGINT)
    return told, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--recipes", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = []
    with tempfile.TemporaryDirectory(prefix="podium-instances-") as name:
        for recipe in options.recipes:
            rates: dict[int, list[float]] = {count: [] for count in options.counts}
            apart: list[float] = []
            weights: dict[int, set[str]] = {count: set() for count in options.counts}
            for _ in range(options.rounds):
                for count in options.counts:
                    found, digest = rate(recipe, count, Path(name))
                    rates[count].append(found)
                    weights[count].add(digest)
                    print(f"{recipe} on {count}: {found:,.0f} samples/s, {digest[:12]}", flush=True)
                apart.append(rate_apart(recipe, Path(name)))
                print(f"{recipe}, two runs apart: {apart[-1]:,.0f} samples/s", flush=True)
            assert len(set.union(*weights.values())) == 1, "weights differ"
            for count in options.counts:
                middle = statistics.median(rates[count])
                speedup = statistics.median(a / b for a, b in zip(rates[count], rates[options.counts[0]], strict=True))
                spread = f"{min(rates[count]):,.0f} … {max(rates[count]):,.0f}"
                (digest,) = weights[count]
                lines.append(f"| {recipe} | {count} | {middle:,.0f} | {spread} | {speedup:.2f} | {digest[:16]} |")
            first = rates[options.counts[0]]
            speedup = statistics.median(a / b for a, b in zip(apart, first, strict=True))
            spread = f"{min(apart):,.0f} … {max(apart):,.0f}"
            lines.append(f"| {recipe} | 1 + 1 apart | {statistics.median(apart):,.0f} | {spread} | {speedup:.2f} | |")
        kills = [seconds_after_kill(Path(name)) for _ in range(options.rounds)]
    told, again = (statistics.median(values) for values in zip(*kills, strict=True))
    text = "\n".join(
        [
            "# Instances",
            "",
            f"{when_and_where(load)}. "
            f"8 replicas, 1 thread each; medians of {options.rounds} rounds in turns. "
            "Made by `python -m bench.instances`.",
            "",
            "| recipe | instances | samples/s | least … most | against 1 instance | weights_sha256 |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            f"After SIGKILL of one of two instances (mnist): {told:.1f} s until the launcher says so and starts anew, "
            f"{again:.1f} s until the next update is done.",
            "",
        ]
    )
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
