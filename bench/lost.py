"""How long a run pauses when an instance is lost, when another one has come, and when one leaves.

    python -m bench.lost [--kills 10] [--joins 10]      three minutes; prints a table, writes results/lost.md

An mnist run on two instances of this host loses one of them by SIGKILL, the first and the second in turn, again and
again, each time once the last one was replaced. Then, in another run, instances are added by `podium join` and taken
away by `podium leave`, in turn. Every update is recorded, as the record tells when it was complete.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "lost.md"
RECIPE = ["mnist", "workload.data.source=generated", "workload.data.generated_train=4096", "batch.micro=16",
          "workload.data.generated_test=64", "batch.replicas=4", "train.length=1000000up", "valid.every=1000000up",
          "checkpoint.every=1000000up", "engine.updates_per_call=1", "engine.threads=1", "log.tensorboard=false",
          "launch.restarts=1000", "log.report=false"]  # fmt: skip

PODIUM = [sys.executable, "-m", "podium"]
BEGUN = re.compile(r"2 instances train from update (\d+)")


def last_update(metrics: Path) -> int:
    """The last update with a record."""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        lines = file.read().split(b"\n")
    return int(json.loads(lines[-2])["update"]) if len(lines) > 1 and lines[-2].startswith(b"{") else 0


def until(happened: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait closely; the time at which it has happened."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise SystemExit("it did not come to that")
        time.sleep(0.002)
    return time.monotonic()


def is_after(metrics: Path, update: int) -> bool:
    return last_update(metrics) > update


def is_replaced(errors: Path, times: int) -> bool:
    """Whether two instances have gone on more often than that."""
    return len(BEGUN.findall(errors.read_text())) > times


def instances(process: subprocess.Popen) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(process.pid).children():
        try:
            found[int(child.environ()["RANK"])] = child
        except (psutil.Error, KeyError):
            continue
    return found


def longest_pause(metrics: Path, first: int, last: int) -> float:
    """The longest time between two updates of a stretch."""
    records = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    times = [record["time/total_s"] for record in records if first <= record["update"] <= last]
    return max(after - before for before, after in pairwise(times))


@contextmanager
def trained(folder: Path, num_instances: str) -> Iterator[subprocess.Popen]:
    """The run, as long as entered; what it has said is shown where something does not come to pass."""
    command, errors = [*PODIUM, "train", *RECIPE, "--instances", num_instances, "--out", "run"], folder / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield process
    except SystemExit:
        print(errors.read_text())
        raise
    finally:
        for child in [*instances(process).values(), psutil.Process(process.pid)]:
            child.kill()
        process.wait()


def measure(folder: Path, kills: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds from SIGKILL to the next update, until the lost one is replaced, of the pause for that; updates lost."""
    metrics, errors = folder / "run" / "metrics.jsonl", folder / "stderr"
    back, replaced, pauses = list[float](), list[float](), list[float]()
    with trained(folder, "2") as process:
        until(lambda: metrics.exists() and last_update(metrics) > 20)
        for kill in range(kills):
            time.sleep(1)
            running = instances(process)
            victim = running[sorted(running)[kill % 2]]
            num_replaced = len(BEGUN.findall(errors.read_text()))
            began = time.monotonic()
            victim.kill()
            psutil.wait_procs([victim])
            before = last_update(metrics)
            back.append(until(partial(is_after, metrics, before)) - began)
            replaced.append(until(partial(is_replaced, errors, num_replaced)) - began)
            joined = int(BEGUN.findall(errors.read_text())[-1])
            until(partial(is_after, metrics, joined + 5))
            if kill % 2:  # else another process writes the times, from a clock of its own
                pauses.append(longest_pause(metrics, joined - 2, joined + 2))
    assert "restarting" not in errors.read_text(), errors.read_text()
    return back, replaced, pauses, updates_lost(metrics)


def updates_lost(metrics: Path) -> int:
    """How many updates have no record, or several."""
    updates = [json.loads(line)["update"] for line in metrics.read_bytes().splitlines()]
    return len(set(range(1, updates[-1] + 1)) - set(updates)) + len(updates) - len(set(updates))


def asked(folder: Path, *words: str) -> int:
    """Run a command that has instances come or leave; return the update from which the others go on."""
    done = subprocess.run([*PODIUM, *words, "--instances", "1"], cwd=folder, capture_output=True, text=True)
    found = re.search(r"trains? from update (\d+)", done.stdout + done.stderr)
    if done.returncode or found is None:
        raise SystemExit(done.stdout + done.stderr)
    return int(found[1])


def measure_joins(folder: Path, joins: int) -> tuple[list[float], list[float], int]:
    """Seconds of the pause when an instance comes, and when one leaves; updates lost. The first one stays: the times
    are those of its clock."""
    metrics = folder / "run" / "metrics.jsonl"
    pauses: dict[str, list[float]] = {"join": [], "leave": []}
    with trained(folder, "1..2") as process:
        until(lambda: (folder / "run" / "launch.json").exists() and last_update(metrics) > 20)
        if len(instances(process)) == 2:
            asked(folder, "leave", "run")
        for turn in range(2 * joins):
            what = ("join", "leave")[turn % 2]
            began = asked(folder, what, "run")
            until(partial(is_after, metrics, began + 5))
            pauses[what].append(longest_pause(metrics, began - 2, began + 2))
    return pauses["join"], pauses["leave"], updates_lost(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--joins", type=int, default=10)
    parsed, load = parser.parse_args(), os.getloadavg()[0]
    kills, joins = parsed.kills, parsed.joins
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, lost = list[tuple[str, list[float]]](), 0
    if kills:
        with tempfile.TemporaryDirectory() as folder:
            back, replaced, pauses, lost = measure(Path(folder), kills)
        rows += [
            ("from SIGKILL to the next update", back),
            ("from SIGKILL until it is replaced", replaced),
            ("pause when the other one has come", pauses),
        ]
    if joins:
        with tempfile.TemporaryDirectory() as folder:
            come, left, more = measure_joins(Path(folder), joins)
        rows += [("pause when one is added by `podium join`", come), ("pause when one leaves by `podium leave`", left)]
        lost += more
    text = (
        f"# Instances that are lost\n\n{when_and_where(load)}. {kills} kills of one of two instances of an mnist run, "
        f"{joins} instances added and taken away, "
    )
    text += f"by `python -m bench.lost`, whose first lines say how. Updates lost or made twice: {lost}. "
    text += "Restarts from a checkpoint: 0.\n\n| seconds | median | least | most |\n|---|---|---|---|\n"
    for name, values in rows:
        text += f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |\n"
    print(text)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
