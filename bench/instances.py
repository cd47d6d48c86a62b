"""Samples per second and weights on 1, 2, 4 and 8 instances, and how long a run takes to recover after a kill.

    python -m bench.instances            40 minutes; prints tables and writes bench/results/instances.md
    python -m bench.instances --quick    under 4 minutes: samples/s only, on 1 to 8; writes results/any_number.md

Every row is `podium train … --instances N` in processes of its own, one thread per replica. The machine's speed varies
for minutes at a time, so all rows are started and stopped (SIGSTOP), and then continue one after the other for some
seconds each, in a different order every round; the most important ones have several turns in a round. A ratio is taken
between the means of a round, so the values compared were measured within two minutes. Rates are taken between a
stretch's first and last record. There are several sets of such processes, so that no single start decides the result.
With --quick, runs are started, measured and ended one after the other, in rounds that go up and down the counts.
"At best" compares the 90th percentiles of the stretches. Weights are those of short runs to their end, and must agree.
The machine's own limit is shown by two independent runs of one instance side by side, each on a core of its own.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from bench.where import when_and_where
from podium.launch.core_rotation import CoreRotation
from podium.machine.cores import numa_nodes

RESULTS = Path(__file__).parent / "results" / "instances.md"
CASES = {
    "neuron/full": ["workload.data.source=generated", "workload.data.samples=6144", "batch.micro=192",
                    "engine.updates_per_call=1"],
    "mnist": ["workload.data.source=generated", "batch.micro=16", "engine.updates_per_call=4"],
}  # fmt: skip
#: seconds of a stretch and rounds, with --quick
QUICK = {"mnist": (4.0, 2), "neuron/full": (6.0, 1)}
#: length of the runs to the end, and seconds of a stretch
LENGTHS = {"neuron/full": ("4up", 8.0), "mnist": ("60up", 3.0)}
PLAIN = ["batch.replicas=8", "engine.threads=1", "valid.every=0", "valid.max_samples=8",
         "checkpoint.every=0", "log.report=false", "log.tensorboard=false", "schedule.warmup=0"]  # fmt: skip
#: Rows besides those of instance counts. For the second, this script rotates the cores of the first one's processes.
KEPT, TURNED, APART = "2, cores kept", "2, the same by turns", "1 + 1 apart"
#: number of turns in a round, for the rows that have more than one
OFTEN = {"1": 3, "2": 3, APART: 3}
TURN_S = 0.1


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "podium", *map(str, args)]


def weights(recipe: str, num_instances: int, out: Path) -> str:
    """Return the sha256 of the weights of a short run."""
    length, _ = LENGTHS[recipe]
    args = ["train", recipe, *CASES[recipe], *PLAIN, f"train.length={length}", "--instances", num_instances]
    subprocess.run(command(*args, "--out", out), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


class Runs:
    """One row: runs that continue side by side while they are measured, and are stopped otherwise."""

    def __init__(self, recipe: str, name: str, folder: Path) -> None:
        self._metrics, self._trees = [], []
        cores = sorted(os.sched_getaffinity(0))[:2] if name == APART else [None]
        for core in cores:
            out = folder / f"{time.monotonic_ns()}"
            args = ["train", recipe, *CASES[recipe], *PLAIN, "train.length=1000000up", "--out", out,
                    f"launch.turns={'false' if name == KEPT else 'true'}", "--instances", name[0]]  # fmt: skip
            # In a session of its own: a shell that exits sends SIGHUP to the stopped processes of its session.
            run = subprocess.Popen(
                command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            if core is not None:
                os.sched_setaffinity(run.pid, {core})
            self._metrics.append(out / "metrics.jsonl")
            while len(_records(self._metrics[-1])) < 3:
                assert run.poll() is None, run.args
                time.sleep(0.05)
            launcher = psutil.Process(run.pid)
            self._trees.append([launcher, *launcher.children(recursive=True)])
            self._send(signal.SIGSTOP)

    def rate(self, seconds: float, *, turned: bool = False) -> float:
        """Return the samples per second of all runs together, over a stretch."""
        before = [len(_records(path)) for path in self._metrics]
        turns, instances = CoreRotation(numa_nodes()), [process.pid for process in self._trees[0][1:]]
        end = time.monotonic() + seconds
        self._send(signal.SIGCONT)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, TURN_S) if turned else left)
            assert not turned or turns.rotate(instances)
        self._send(signal.SIGSTOP)
        total = 0.0
        for path, count in zip(self._metrics, before, strict=True):
            records = _records(path)
            first, last = records[count], records[-1]  # before the first one it may have been stopped
            total += (last["samples"] - first["samples"]) / (last["time/total_s"] - first["time/total_s"])
        return total

    def end(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for tree in self._trees:
            for process in tree:
                process.send_signal(number)


def _records(metrics: Path) -> list[dict[str, float]]:
    """Return the records that are completely written."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def going(recipe: str, names: Sequence[str], folder: Path) -> Iterator[dict[str, Runs]]:
    with ExitStack() as stack:
        rows = {}
        for name in names:
            if name != TURNED:
                rows[name] = Runs(recipe, name, folder)
                stack.callback(rows[name].end)
        yield {**rows, TURNED: rows[KEPT]}


def rates(recipe: str, names: Sequence[str], num_sets: int, rounds: int, folder: Path) -> dict[str, list[list[float]]]:
    """Return the samples per second of every stretch, by row and round."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    _, seconds = LENGTHS[recipe]
    turns = [name for name in names for _ in range(OFTEN.get(name, 1))]
    draw = random.Random(0)
    for _ in range(num_sets):
        with going(recipe, names, folder) as rows:
            for _ in range(rounds):
                for values in found.values():
                    values.append([])
                for name in draw.sample(turns, len(turns)):
                    found[name][-1].append(rows[name].rate(seconds, turned=name == TURNED))
                newest = {name: [round(rate) for rate in values[-1]] for name, values in found.items()}
                print(recipe, newest, flush=True)
    return found


def best(rounds: list[list[float]]) -> float:
    """Return the rate that nine of ten stretches stay below."""
    return statistics.quantiles((rate for rates in rounds for rate in rates), n=10, method="inclusive")[-1]


def ratios(rounds: list[list[float]], to: list[list[float]]) -> list[float]:
    """Return the ratio of the means of every round."""
    return [statistics.mean(ours) / statistics.mean(theirs) for ours, theirs in zip(rounds, to, strict=True)]


def seconds_after_kill(folder: Path) -> tuple[float, float]:
    """Return the seconds (until the launcher reports it, until the next update's record) after killing one of two."""
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
        while b"the others go on without it" not in (folder / "err").read_bytes():
            time.sleep(0.01)
        told, before = time.perf_counter() - killed, newest()
        while newest() <= before:
            time.sleep(0.01)
        again = time.perf_counter() - killed
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGINT)
    return told, again


def quick(folder: Path, load: float, recipes: Sequence[str], counts: Sequence[int]) -> str:
    """Return the page of samples per second on these numbers of instances."""
    lines = []
    for recipe in recipes:
        seconds, num_rounds = QUICK[recipe]
        found: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(num_rounds):
            for count in sorted(found, reverse=number % 2 > 0):
                runs = Runs(recipe, str(count), folder)
                found[count].append(runs.rate(seconds))
                runs.end()
                print(recipe, count, round(found[count][-1]), flush=True)
        first = statistics.mean(found[counts[0]])
        for count, rates_of in found.items():
            mean = statistics.mean(rates_of)
            each = ", ".join(f"{rate:,.0f}" for rate in rates_of)
            lines.append(f"| {recipe} | {count} | {mean:,.0f} | {mean / first:.2f} | {each} |")
    return "\n".join(
        [
            "# Samples per second on any number of instances",
            "",
            f"{when_and_where(load)}; {os.getloadavg()[0]:.2f} at the end. 8 replicas, 1 thread each; the mean of the "
            "stretches. Made by `python -m bench.instances --quick`, whose first lines say how.",
            "",
            f"| recipe | instances | samples/s | against {counts[0]} | stretches |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--counts", nargs="+", type=int, help="1 2 4 8; with --quick all from 1 to 8")
    parser.add_argument("--recipes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="samples/s only, on 1 to 8 instances")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if options.quick:
        with tempfile.TemporaryDirectory(prefix="podium-instances-") as name:
            text = quick(Path(name), load, options.recipes, options.counts or range(1, 9))
        print(text)
        if options.counts is None and options.recipes == list(CASES):
            RESULTS.with_name("any_number.md").write_text(text, encoding="utf-8")
        return
    options.counts = options.counts or [1, 2, 4, 8]
    names = [*map(str, options.counts), KEPT, TURNED, APART]
    lines, gains = [], []
    with tempfile.TemporaryDirectory(prefix="podium-instances-") as name:
        folder = Path(name)
        for recipe in options.recipes:
            digests = {count: weights(recipe, count, folder / f"{time.monotonic_ns()}") for count in options.counts}
            assert len(set(digests.values())) == 1, f"weights differ: {digests}"
            found = rates(recipe, names, options.sets, options.rounds, folder)
            first = found[names[0]]
            for row, values in found.items():
                low, middle, high = statistics.quantiles(ratios(values, first))
                digest = digests.get(int(row), "") if row.isdigit() else ""
                rate = statistics.median(rate for rates in values for rate in rates)
                lines.append(
                    f"| {recipe} | {row} | {rate:,.0f} | {middle:.2f} | {low:.2f} … {high:.2f} "
                    f"| {best(values) / best(first):.2f} | {digest[:16]} |"
                )
            gain = statistics.quantiles(ratios(found[TURNED], found[KEPT]))
            gains.append(f"{gain[1]:.3f} for {recipe} (quartiles {gain[0]:.3f} … {gain[2]:.3f})")
        kills = [seconds_after_kill(folder) for _ in range(options.sets)]
    told, again = (statistics.median(values) for values in zip(*kills, strict=True))
    text = "\n".join(
        [
            "# Instances",
            "",
            f"{when_and_where(load)}. "
            f"8 replicas, 1 thread each; medians of {options.sets} sets of {options.rounds} rounds in turns, with the "
            "quartiles of the ratios; at best: what nine of ten stretches stay below, against the same of 1 instance. "
            "Made by `python -m bench.instances`.",
            "",
            "| recipe | instances | samples/s | against 1 instance | quartiles | at best | weights_sha256 |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
            f"Cores by turns against cores kept, in the same processes: {', '.join(gains)}.",
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
