"""Measures how busy the machine is while a run trains, and writes what `podium monitor` shows. Used by `train.py`.

One thread for each instance wakes every two seconds, reads the system's counters and replaces one small file
(`runs/live.py`). It asks nothing of the training, which never waits for it. `log.monitor: false` leaves it out.
"""

import hashlib
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from podium.errors import UserError
from podium.machine.accelerator import accelerator_of
from podium.machine.device import device_identity
from podium.machine.usage import Reading, UsageMeter
from podium.runs.folder import Run, replace_file
from podium.runs.live import forget_instances, instance_file
from podium.training.build import Training
from podium.training.clock import Clock
from podium.ui.console import warn

EVERY_S = 2.0
#: rates are shown over this many writings, so that long updates have some, too
_WINDOW = 8
#: how long the end of a training waits for a thread that writes to a file system that hangs
_END_S = 5.0


class Monitoring:
    """The figures of this instance and its host. A context manager around the training."""

    def __init__(self, run: Run, training: Training, clock: Clock, every_s: float = EVERY_S) -> None:
        placement = training.placement
        self._training, self._clock, self._every_s = training, clock, every_s
        self._on = training.recipe.log.monitor
        self._run = run
        self._writes = True
        #: how many instances have files, as far as the lead has seen to it
        self._num_shown: int | None = None
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._go_on, name="podium-monitor", daemon=True)
        self._history: deque[tuple[float, int, dict[str, float]]] = deque(maxlen=_WINDOW)
        self._reading, self._is_fresh, self._num_written = Reading(), False, 0
        self._sums, self._most, self._num_readings = dict[str, float](), dict[str, float](), 0
        self._before = dict(run.summary().get("energy", {})) if placement.is_lead else {}
        self._energy: dict[str, float] = {}
        self._began = time.monotonic()
        if self._on:
            self._uuid = device_identity(placement.device)
            first_of_host = placement.instances.index == placement.instances.neighbours.start
            self._meter = UsageMeter(host=first_of_host, accelerator=accelerator_of(placement.device))

    def __enter__(self) -> Self:
        if self._on:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._on:
            self._thread.join(_END_S)

    def record(self) -> dict[str, float]:
        """Return the latest reading for a metric record, once: nothing until there is another one."""
        if not self._is_fresh:
            return {}
        self._is_fresh = False
        return {f"system/{name}": value for name, value in self._reading.values.items()}

    def measure_energy(self) -> None:
        """Sum up the energy of all hosts and accelerators so far. Collective."""
        if not self._on:
            return
        self._measure()
        values = self._reading.values
        device = float(int(hashlib.sha256(self._uuid.encode()).hexdigest()[:12], 16)) if self._uuid else math.nan
        own = [values.get("energy_j", math.nan), device, values.get("accelerator_energy_j", math.nan)]
        rows = self._training.placement.instances.gather(torch.tensor(own, dtype=torch.float64)).reshape(-1, 3).tolist()
        devices = {row[1]: row[2] for row in rows}  # instances that share one measure the same
        found = {
            "processor_j": [row[0] for row in rows if not math.isnan(row[0])],
            "accelerator_j": [joules for joules in devices.values() if not math.isnan(joules)],
        }
        self._energy = {name: sum(joules) for name, joules in found.items() if joules}
        if self._energy:
            self._energy["measured_s"] = time.monotonic() - self._began

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` holds of it: means, largest values, energy where it is measured, and what is
        unknown."""
        if not self._on:
            return {}
        with self._lock:
            mean = {name: total / self._num_readings for name, total in self._sums.items() if not _adds_up(name)}
            most = {name: value for name, value in self._most.items() if not _adds_up(name)}
        energy = {
            name: self._before.get(name, 0.0) + self._energy.get(name, 0.0) for name in (*self._before, *self._energy)
        }
        facts: dict[str, Any] = {
            "system": {"mean": _rounded(mean), "most": _rounded(most), "unknown": self._reading.unknown}
        }
        return facts | ({"energy": _rounded(energy)} if energy else {})

    def _measure(self) -> None:
        with self._lock, suppress(Exception):  # no system that tells something unheard of may end a training
            reading = self._meter.read()
            self._num_readings += 1
            for name, value in reading.values.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._most[name] = max(self._most.get(name, value), value)
            self._reading, self._is_fresh = reading, True

    def _go_on(self) -> None:
        self._try_to_write()
        while not self._ending.wait(self._every_s):
            self._measure()
            self._try_to_write()
        self._try_to_write(ended=True)

    def _try_to_write(self, *, ended: bool = False) -> None:
        if not self._writes:
            return
        try:
            self._write(ended=ended)
        except Exception as error:
            self._writes = False
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            warn(f"{reason}; the run goes on without what `podium monitor` shows of this instance")

    def _write(self, *, ended: bool) -> None:
        training, placement = self._training, self._training.placement
        batch, topology = training.recipe.batch, placement.topology
        seconds, phase = self._clock.peek()
        update = training.state.progress.update
        self._history.append((time.perf_counter(), update, seconds))
        began, first, before = self._history[0]
        self._num_written += 1
        facts = {
            "instance": placement.instances.index,
            "instances": placement.instances.count,
            "host": socket.gethostname() if len(topology.hosts) == 1 else topology.host_of(placement.instances.index),
            "pid": os.getpid(),
            "every_s": self._every_s,
            "number": self._num_written,
            "ended": ended,
            "phase": phase,
            "update": update,
            "total_updates": training.task.lengths.total_updates,
            "global_batch": batch.global_batch,
            "local_batch": batch.micro_batch * batch.num_accumulation * len(placement.replicas),
            "window": {
                "seconds": time.perf_counter() - began,
                "updates": max(0, update - first),
                "phases": {name: value - before[name] for name, value in seconds.items()},
            },
            "values": self._reading.values,
            "unknown": self._reading.unknown,
        }
        path = instance_file(self._run, placement.instances.index)
        with suppress(FileExistsError):
            path.parent.mkdir(exist_ok=True)
        if ended and not self._is_own(path):  # another instance has this number since
            return
        replace_file(path, json.dumps(facts).encode())
        if placement.is_lead and self._num_shown != placement.instances.count:
            self._num_shown = placement.instances.count
            forget_instances(self._run, self._num_shown)

    def _is_own(self, path: Path) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads(path.read_bytes()).get("pid") == os.getpid())
        return True


def _adds_up(name: str) -> bool:
    return name.endswith("energy_j")


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
