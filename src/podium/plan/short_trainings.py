"""Trains for a moment with `podium train` itself, and reads from its records what updates take.

So whatever a training does beside its updates is measured: records, digests, heartbeats, monitoring, instances that
rotate over the cores and wait for one another.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.launch.lifeline import LAUNCHER
from podium.recipe.loading import Recipe, recipe_with, to_yaml
from podium.runs import kubeflow
from podium.runs.facts import Record, read_records
from podium.topology import share_of_cores, usable_cores

_LOOK_S = 0.05
#: records of a training, if it is long enough: the first one has the first updates in it, which take longer
FEWEST_RECORDS = 4
_TIMEOUT_S = 300.0
_END_S = 60.0
#: what nobody is to be told of, and what costs time before and after the updates alone
_QUIET = {
    "log.wandb": "off", "log.mlflow": "off", "log.trackio": "off", "log.observers": [], "log.report": False,
    "train.time_limit": None,
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """What a short training has shown."""

    #: seconds of an update, once the first ones are over
    update_s: float
    #: processor time of an update in the first of the instances
    busy_s: float
    #: what the first updates took beyond that many later ones
    warm_up_s: float
    #: from the start of the instances to the first update
    startup_s: float


def train_a_moment(
    recipe: Recipe, keys: Mapping[str, Any], count: int, seconds: float, cores: Collection[int] | None = None
) -> Moment:
    """Train for about `seconds` beside the start, on `count` instances that share `cores`: all, if none are given."""
    with tempfile.TemporaryDirectory(prefix="podium-plan-") as folder, _bound_to(cores):
        file, run, log = Path(folder, "recipe.yaml"), Path(folder, "run"), Path(folder, "log")
        file.write_text(to_yaml(recipe_with(recipe, {**keys, **_QUIET}).tree()), encoding="utf-8")
        command = [sys.executable, "-m", "podium", "train", str(file), "--instances", str(count), "--out", str(run)]
        process = _started(command, log)
        try:
            records = _records(process, run / "metrics.jsonl", seconds)
        finally:
            _end(process)
        if not records:
            last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
            raise UserError(
                f"a short training on {count} instances could not be measured: {last.removeprefix('podium: ')[:300]}"
            )
        own_cores = len(share_of_cores(usable_cores(), 0, count)) if count > 1 else len(usable_cores())
    return _moment(records, own_cores)


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != kubeflow.ADDRESS}
    with log.open("wb") as said:
        return subprocess.Popen(
            command, env={**env, LAUNCHER: str(os.getpid())}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip


def _records(process: subprocess.Popen[bytes], file: Path, seconds: float) -> list[Record]:
    """Return the records of a training once there are enough of them, or it has ended."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        records = read_records(file)
        if ended or (len(records) >= FEWEST_RECORDS and _lasted_s(records) > seconds):
            return records
        time.sleep(_LOOK_S)


def _lasted_s(records: list[Record]) -> float:
    return float(records[-1]["time/total_s"] - records[0]["time/total_s"])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _moment(records: list[Record], num_cores: int) -> Moment:
    """Return what the records tell; `num_cores`: those of an instance."""
    spans = list(_spans(records))
    later = spans[1:] or spans
    num_updates = sum(num for num, _ in later)
    update_s = sum(seconds for _, seconds in later) / num_updates
    # The share of the processor is that of all the time since the record before, validations included.
    plain = [record for record in records[1:] if not any(name.startswith("valid/") for name in record)]
    shares = [record["device/cpu_percent"] / 100 for record in plain or records]
    first, took = spans[0]
    return Moment(
        update_s=update_s,
        busy_s=statistics.median(shares) * num_cores * update_s,
        warm_up_s=max(0.0, took - first * update_s),
        startup_s=max(0.0, records[0]["time/total_s"] - took),
    )


def _spans(records: list[Record]) -> Iterator[tuple[int, float]]:
    """Yield (updates, their seconds) of each record, without what followed them."""
    update = samples = 0
    for record in records:
        num, num_samples = record["update"] - update, record["samples"] - samples
        update, samples = record["update"], record["samples"]
        if num > 0:
            yield num, num_samples / record["train/samples_per_second"]


@contextmanager
def _bound_to(cores: Collection[int] | None) -> Iterator[None]:
    """Bind this thread, and the processes that it starts, to cores inside the `with` block."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
