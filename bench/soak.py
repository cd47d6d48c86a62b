"""Instances that are lost and come, again and again, while a training goes on as if nothing happened.

    python -m bench.soak                   about six minutes: 50 kills; prints a table, writes results/soak.md
    python -m bench.soak --kills 6 --minutes 1 --spare      shorter, with the optimiser's state sharded

Three instances of this host train a small model on six replicas. At random moments (of `--seed`) one of them ends by
SIGKILL, whichever it is, while at least two train; the launcher starts another, which comes between two updates, or is
killed before. Around every second kill, `podium join` adds an instance, or the next time `podium leave` takes one away;
the kill comes while the request is under way. (With `--spare` it comes after: two shares that are lost at once are more
than one spare copy holds.)

Every update is recorded, so records tell when each was complete, and whether one is missing or was made twice. Passes
sleep a little, so that the run takes its time and not the machine's; nothing else of it depends on that. In the end
`podium verify` makes all updates again on another number of instances, without sleep and without kills, and compares
every record to the bit.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench.lost import PODIUM, instances, is_after, last_update, until, updates_lost
from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "soak.md"
COUNT = 3
WORKLOAD = """\
import os
import time

import numpy as np
from torch import nn

import podium

SLEEP_S = float(os.environ.get("PODIUM_SOAK_SLEEP", "0"))


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(SLEEP_S)
        return super().forward(x)


class Squares(podium.Workload):
    loss = "mse"

    def build_model(self):
        return nn.Sequential(Slow(3, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))

    def source(self, split):
        random = np.random.default_rng({"train": 0, "valid": 1}[split])
        x = random.normal(size=(4096, 3))
        return x, (x**2).sum(axis=1)
"""
RECIPE = """\
workload: { name: squares.py }
batch: { micro: 8, replicas: 6 }
train: { length: 10000000up }
optim: { name: adamw, lr: 1e-3 }
engine: { updates_per_call: 1, threads: 1 }
valid: { every: 1000000up }
checkpoint: { every: 1000000up }
log: { tensorboard: false, report: false }
launch: { restarts: 100000 }
"""


@dataclass(frozen=True)
class Kill:
    """What came of one."""

    #: whether it was the first of the instances, and how many are left
    was_lead: bool
    left: int
    #: from SIGKILL to the next update
    seconds: float
    #: what was asked for at the time: "join", "leave" or nothing
    asked: str


class Request:
    """`podium join` or `podium leave` of one instance, while it is under way."""

    def __init__(self, what: str, folder: Path) -> None:
        self.what, command = what, [*PODIUM, what, "run", "--instances", "1"]
        self._process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self) -> None:
        """Wait until the run goes on as asked."""
        told, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, told

    def end(self) -> None:
        self._process.kill()


def num_training(metrics: Path) -> int:
    """Return how many instances made the last update."""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 8192))
        line = file.read().split(b"\n")[-2]
    return int(json.loads(line).get("topology/instances", 1))


def are_training(metrics: Path, count: int) -> bool:
    """Return whether at least so many made the last update."""
    return num_training(metrics) >= count


def soak(folder: Path, kills: int, seconds: float, draw: random.Random, spare: bool) -> list[Kill]:
    """Train while instances are killed; leave the run in `folder`, interrupted by a signal."""
    (folder / "squares.py").write_text(WORKLOAD, encoding="utf-8")
    (folder / "squares.yaml").write_text(RECIPE, encoding="utf-8")
    metrics, errors = folder / "run" / "metrics.jsonl", folder / "stderr"
    command = [*PODIUM, "train", "squares.yaml", "--instances", str(COUNT), "--out", "run"]
    command += ["parallel.shard=optimiser", "launch.spare_copies=1"] if spare else []
    found, request, count = list[Kill](), None, COUNT
    with errors.open("wb") as stderr:
        environment = {**os.environ, "PODIUM_SOAK_SLEEP": "0.005"}
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
    try:
        until(lambda: metrics.exists() and last_update(metrics) > 20)
        end = time.monotonic() + seconds
        while len(found) < kills:
            time.sleep(2 * draw.random() * max(0.1, (end - time.monotonic()) / (kills - len(found) + 1)))
            if len(found) % 2:
                leaves = len(found) % 4 == 3
                until(partial(are_training, metrics, 3 if leaves else 1))
                request, count = Request("leave" if leaves else "join", folder), count + (-1 if leaves else 1)
                if spare:
                    request.finish()
                else:
                    time.sleep(2 * draw.random())
            until(partial(are_training, metrics, 2))
            running = instances(process)
            victim = draw.choice(sorted(running))
            was_lead = victim == min(running)
            began = time.monotonic()
            running[victim].kill()
            psutil.wait_procs([running[victim]])
            before = last_update(metrics)
            took = until(partial(is_after, metrics, before)) - began
            found.append(Kill(was_lead, num_training(metrics), took, request.what if request else ""))
            if request is not None and not spare:
                request.finish()
            request = None
        until(lambda: num_training(metrics) == count)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, errors.read_text()
    except BaseException:
        print(errors.read_text()[-4000:])
        raise
    finally:
        if request is not None:
            request.end()
        if process.poll() is None:
            for child in [*instances(process).values(), psutil.Process(process.pid)]:
                child.kill()
            process.wait()
    assert "restarting" not in errors.read_text(), errors.read_text()
    return found


def verified(folder: Path) -> str:
    """Make all updates again on two instances; return the sentence of `podium verify`, which has to be a good one."""
    command = [*PODIUM, "verify", "run", "--instances", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def page(found: list[Kill], lost: int, updates: int, verdict: str, load: float, options: argparse.Namespace) -> str:
    shard = "`parallel.shard=optimiser` with `launch.spare_copies=1`" if options.spare else "the whole state on each"
    joins, leaves = (sum(kill.asked == what for kill in found) for what in ("join", "leave"))
    text = (
        f"# Kills and replacements in turn\n\n{when_and_where(load)}; {os.getloadavg()[0]:.2f} at the end. "
        f"{len(found)} kills of single instances of {COUNT} or {COUNT + 1}, {shard}; instances added by `podium join`: "
        f"{joins}, taken away by `podium leave`: {leaves}; by `python -m bench.soak --kills {options.kills} "
        f"--minutes {options.minutes:g} --seed {options.seed}{' --spare' if options.spare else ''}`, whose first lines "
        f"say how. {updates:,} updates; lost or made twice: {lost}. Restarts from a checkpoint: 0. `podium verify`: "
        f"{verdict}.\n\n"
        "| from SIGKILL to the next update | kills | median, s | least | 9 of 10 | most |\n|---|---|---|---|---|---|\n"
    )
    groups = {
        "all": found,
        "of the first instance": [kill for kill in found if kill.was_lead],
        "of another": [kill for kill in found if not kill.was_lead],
        "one was left": [kill for kill in found if kill.left == 1],
        "two or more were left": [kill for kill in found if kill.left > 1],
        "around a `podium join`": [kill for kill in found if kill.asked == "join"],
        "around a `podium leave`": [kill for kill in found if kill.asked == "leave"],
    }
    for name, group in groups.items():
        if group:
            seconds = sorted(kill.seconds for kill in group)
            most = seconds[min(len(seconds) - 1, round(0.9 * len(seconds)))]
            text += f"| {name} | {len(group)} | {statistics.median(seconds):.2f} | {seconds[0]:.2f} | {most:.2f} | "
            text += f"{seconds[-1]:.2f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=4.5, help="that the kills are spread over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spare", action="store_true", help="shard the optimiser's state, with spare copies")
    options = parser.parse_args()
    load, draw = os.getloadavg()[0], random.Random(options.seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = soak(folder, options.kills, 60 * options.minutes, draw, options.spare)
        metrics = folder / "run" / "metrics.jsonl"
        lost, updates = updates_lost(metrics), last_update(metrics)
        verdict = verified(folder)
    text = page(found, lost, updates, verdict, load, options)
    print(text)
    if options.kills >= 50 and not options.spare:
        RESULTS.write_text(text, encoding="utf-8")
    assert lost == 0, f"{lost} updates are lost or were made twice"


if __name__ == "__main__":
    main()
