"""Measures choices in separate processes, as many as the choice has instances.

    python -m podium.tune.measure RECIPE [KEY=VALUE]...     one such process, started by `MeasuringProcesses`

A process reads one request per line (JSON: recipe keys, seconds) and answers with samples/s and the seconds of every
update. It stays for all choices with its number of instances, so that Python starts and the data is read only once.
"""

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO, Any

import torch
import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.engine.state import Task
from podium.engine.update import Events
from podium.errors import PodiumError
from podium.launch.environment import find_place, place_environment
from podium.launch.lifeline import end_with_launcher
from podium.launch.meeting import Meeting
from podium.launch.point import MeetingPoint
from podium.launch.private_folder import launch_folder
from podium.launch.service import MeetingService, listen_in
from podium.machine.device import resolve_device, use_device
from podium.recipe.loading import Recipe, load_recipe, recipe_with
from podium.topology import build_topology, share_of_cores, usable_cores
from podium.training.build import Training, build_training
from podium.training.feeding import build_engine, samples_of_updates

_START_S = 120.0
_NUM_WARM_UP, _MIN_UPDATES = 2, 2


class MeasuringProcesses:
    """`count` processes that run a recipe together, again and again, each time with another choice."""

    def __init__(self, count: int, name: str, overrides: Sequence[str]) -> None:
        self._kept = ExitStack()
        folder = self._kept.enter_context(launch_folder())
        self._kept.callback(MeetingService(listen_in(folder), b"").close)
        command = [sys.executable, "-m", "podium.tune.measure", name, *overrides]
        #: whether all have answered the last request
        self.ready = True
        self._processes = []
        for index in range(count):
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **place_environment(Meeting(folder=folder), index, count, index, count)},
                )
            )

    def rate(self, keys: Mapping[str, Any], seconds: float, timeout_s: float) -> float | None:
        """Return samples/s over about `seconds`; None where the choice cannot be run, or not within `timeout_s`."""
        answers = self._answers(keys, seconds, timeout_s)
        rates: list[float] = [answer["rate"] for answer in answers or [] if "rate" in answer]
        return min(rates) if len(rates) == len(self._processes) else None

    def details(self, keys: Mapping[str, Any], seconds: float, timeout_s: float) -> list[dict[str, Any]] | None:
        """Return for each instance the seconds of its `updates`, in `waits` for others, and in `exchanges` with them
        (None where unknown); None as for `rate`."""
        answers = self._answers(keys, seconds, timeout_s) or []
        return answers if len(answers) == len(self._processes) and all("updates" in one for one in answers) else None

    def _answers(self, keys: Mapping[str, Any], seconds: float, timeout_s: float) -> list[dict[str, Any]] | None:
        request = json.dumps({"keys": dict(keys), "seconds": seconds}).encode() + b"\n"
        deadline = time.monotonic() + timeout_s
        answers = []
        self.ready = False
        try:
            for process in self._processes:
                _written(process.stdin).write(request)
                _written(process.stdin).flush()
            answers = [_read_line(process.stdout, deadline) for process in self._processes]
        except OSError:  # one of them ended: out of memory, for instance
            return None
        self.ready = all(answers)
        return [json.loads(answer) for answer in answers] if self.ready else None

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._kept.close()


def _written(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _read_line(stream: IO[bytes] | None, deadline: float) -> bytes:
    """Return a whole line, or nothing when it does not come in time or the writer has ended."""
    file = _written(stream).fileno()
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(file, 65536) if ready else b""
        if not part:
            return b""
        line += part
    return line


# --- in the processes ----------------------------------------------------------------------------------------------


def measured_updates(training: Training, seconds: float) -> dict[str, Any]:
    """Return the `rate` of all instances together, samples/s, and of this one the seconds of each of its `updates`, in
    `waits` for others and in `exchanges` with them, after a warm-up that shows how many updates fill `seconds`."""
    recipe, instances = training.recipe, training.placement.instances
    times: list[float] = []
    waits: list[float] = []
    exchanged: float | None = None
    engine = build_engine(training, Events(waits.append))
    with samples_of_updates(training, 0, 2**31) as samples:

        def run(first: int, count: int) -> float:
            waits.clear()
            times[:] = [time.perf_counter()]
            for update in range(first, first + count):
                engine.update(update, next(samples), 1e-6)
                times.append(time.perf_counter())
            engine.collect()  # waits for the device
            times[-1] = time.perf_counter()
            took = torch.tensor([times[-1] - times[0]], dtype=torch.float64)
            return float(instances.gather(took).max())  # the same on all instances

        run(0, 1)
        per_update = run(1, _NUM_WARM_UP) / _NUM_WARM_UP
        count = max(_MIN_UPDATES, math.ceil(seconds / per_update))
        before = training.parallelism.exchange_s
        took = run(1 + _NUM_WARM_UP, count)
        if before is not None:
            exchanged = (training.parallelism.exchange_s or 0.0) - before
    return {
        "rate": count * recipe.batch.global_batch / took,
        "updates": [after - before for before, after in pairwise(times)],
        "waits": sum(waits),
        "exchanges": exchanged,
    }


def main() -> None:
    name, *overrides = sys.argv[1:]
    place = find_place(os.environ)
    assert place is not None
    os.sched_setaffinity(0, share_of_cores(usable_cores(), place.local_index, place.local_count))
    end_with_launcher(os.environ)
    point = MeetingPoint(place, None)  # kept: the connection lasts as long as it does
    store = dist.PrefixStore("tune", point.connect(_START_S))
    recipe = load_recipe(name, overrides)
    device = use_device(resolve_device(recipe.engine.device, place.local_index, recipe.launch.instances_per_device))
    instances = Instances.join(store, place.index, place.count, _START_S, [place.local_count], device)
    first: Task | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            training = _built(recipe_with(recipe, request["keys"]), instances, first)
            first = first or training.task
            answer = measured_updates(training, request["seconds"])
        except PodiumError as error:  # the same on all instances: it depends on the recipe alone
            answer["problem"] = str(error)
        print(json.dumps(answer), flush=True)


def _built(recipe: Recipe, instances: Instances, first: Task | None) -> Training:
    assert isinstance(recipe.engine.threads, int)
    topology = build_topology(recipe.batch.num_replicas, instances.count)
    return build_training(recipe, topology, instances, recipe.engine.threads, data_of=first)


if __name__ == "__main__":
    main()
