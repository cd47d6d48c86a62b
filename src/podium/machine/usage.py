"""How busy a machine is: processor, memory, disk, network, accelerator, power and energy, each measured or unknown.

A figure that cannot be measured is left out of `values`, and `unknown` says why; nothing here is an estimate.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from podium.machine.accelerator import FIGURES as ACCELERATOR_FIGURES
from podium.machine.accelerator import Accelerator, Telling
from podium.machine.energy import POWERCAP, ProcessorEnergy
from podium.machine.memory import host_bytes

#: of the whole host, whoever uses it
HOST_FIGURES = (
    "cpu_percent",
    "memory_bytes",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "network_received_bytes_per_s",
    "network_sent_bytes_per_s",
    "power_w",
    "energy_j",
)
PROCESS_FIGURES = ("process_cpu_percent", "process_memory_bytes")
#: figures that are rates of a counter, and what they are multiplied by
_RATES = {
    "process_cpu_percent": 100.0,
    "disk_read_bytes_per_s": 1.0,
    "disk_write_bytes_per_s": 1.0,
    "network_received_bytes_per_s": 1.0,
    "network_sent_bytes_per_s": 1.0,
    "power_w": 1.0,
}
#: what is raised where the system keeps something to itself, as in some containers
_NOT_OFFERED = (OSError, RuntimeError, ValueError, NotImplementedError, AttributeError, psutil.Error)
FIGURES = (*HOST_FIGURES, *PROCESS_FIGURES, *ACCELERATOR_FIGURES)


@dataclass(frozen=True)
class Reading:
    """Figures of one moment, and of the time since the last one."""

    values: dict[str, float] = field(default_factory=dict)
    #: by name, why a figure is missing
    unknown: dict[str, str] = field(default_factory=dict)


class UsageMeter:
    """Measures what this process and, where `host` is true, its whole host use."""

    def __init__(self, *, host: bool = True, accelerator: Telling | None = None, powercap: Path = POWERCAP) -> None:
        self._process = psutil.Process()
        self._accelerator = accelerator or Accelerator(None)
        self._energy = ProcessorEnergy(powercap) if host else None
        self._before = self._counters()

    def read(self) -> Reading:
        """Measure now; rates are means since the last call."""
        before, now = self._before, self._counters()
        self._before = now
        took = max(1e-9, now["time"] - before["time"])
        values = {**_memory_of(self._process), **self._accelerator.read()}
        unknown = dict(self._accelerator.unknown)
        for name in _RATES:
            if name in now and name in before:
                values[name] = _RATES[name] * max(0.0, now[name] - before[name]) / took
        if self._energy is None:
            unknown |= dict.fromkeys(HOST_FIGURES, "the first instance of the host measures it")
            return Reading(values, unknown)
        if "cpu_total" in now and now["cpu_total"] > before.get("cpu_total", now["cpu_total"]):
            busy = (now["cpu_busy"] - before["cpu_busy"]) / (now["cpu_total"] - before["cpu_total"])
            values["cpu_percent"] = 100 * min(1.0, max(0.0, busy))
        with suppress(*_NOT_OFFERED):
            total, available = host_bytes()
            values["memory_bytes"] = float(total - available)
        if "power_w" in now:
            values["energy_j"] = now["power_w"]
        for name in (*HOST_FIGURES, *PROCESS_FIGURES):
            if name not in values:
                reason = self._energy.unknown if name in ("power_w", "energy_j") else ""
                unknown[name] = reason or "the system does not tell"
        return Reading(values, unknown)

    def _counters(self) -> dict[str, float]:
        """Return everything that only grows, by the name of the figure whose rate it has."""
        counters = {"time": time.perf_counter(), "process_cpu_percent": time.process_time()}
        if self._energy is None:
            return counters
        with suppress(*_NOT_OFFERED):
            cpu = psutil.cpu_times()
            idle = cpu.idle + getattr(cpu, "iowait", 0.0)
            total = (
                sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
            )  # guests are in user already
            counters |= {"cpu_total": total, "cpu_busy": total - idle}
        with suppress(*_NOT_OFFERED):
            disk = psutil.disk_io_counters()
            if disk is not None:
                counters |= {"disk_read_bytes_per_s": disk.read_bytes, "disk_write_bytes_per_s": disk.write_bytes}
        with suppress(*_NOT_OFFERED):
            network = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"]
            if network:
                counters["network_received_bytes_per_s"] = sum(count.bytes_recv for count in network)
                counters["network_sent_bytes_per_s"] = sum(count.bytes_sent for count in network)
        if (joules := self._energy.joules()) is not None:
            counters["power_w"] = joules
        return counters


def _memory_of(process: psutil.Process) -> dict[str, float]:
    with suppress(*_NOT_OFFERED):
        return {"process_memory_bytes": float(process.memory_info().rss)}
    return {}
