"""What an NVIDIA accelerator says of itself: use, memory, power, energy, through NVML, its maker's own library.

The package `nvidia-ml-py` (module `pynvml`) is optional, and loaded only where a training runs on such a device. What
the library or the device does not offer stays unknown.
"""

import importlib
from collections.abc import Callable
from typing import Any

Values = dict[str, float]
Reasons = dict[str, str]

FIGURES = ("accelerator_percent", "accelerator_memory_bytes", "accelerator_power_w", "accelerator_energy_j")


class Accelerator:
    """One accelerator, by its `uuid` as torch gives it; None: this process computes on none that NVML knows."""

    def __init__(self, uuid: str | None, library: Any = None) -> None:
        """`library`: the module to ask, `pynvml` if none is given."""
        self.unknown: Reasons = {}
        self._handle: Any = None
        self._library = library
        self._start_mj: int | None = None
        if uuid is None:
            self._give_up("the training uses no accelerator that NVML knows")
            return
        try:
            self._library = library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._handle = self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())
        except ImportError:
            self._give_up("the package nvidia-ml-py is not installed: pip install 'podium[nvml]'")
        except Exception as error:  # the library's own kinds of error are classes of that library
            self._give_up(f"NVML answers {_said(error)}")

    def read(self) -> Values:
        """Return the figures that the device gives; those that it does not are named in `unknown`."""
        if self._handle is None:
            return {}
        library, handle = self._library, self._handle
        ask: dict[str, Callable[[], float]] = {
            "accelerator_percent": lambda: float(library.nvmlDeviceGetUtilizationRates(handle).gpu),
            "accelerator_memory_bytes": lambda: float(library.nvmlDeviceGetMemoryInfo(handle).used),
            "accelerator_power_w": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "accelerator_energy_j": self._joules,
        }
        found: Values = {}
        for name, question in ask.items():
            if name in self.unknown:
                continue
            try:
                found[name] = question()
            except Exception as error:
                self.unknown[name] = f"NVML answers {_said(error)}"
        return found

    def _joules(self) -> float:
        """Return the energy since the first reading; the device counts in millijoules since its driver was loaded."""
        now = int(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        if self._start_mj is None:
            self._start_mj = now
        if now < self._start_mj:
            raise ValueError("an energy counter that went back")
        return (now - self._start_mj) / 1e3

    def _give_up(self, reason: str) -> None:
        self.unknown = dict.fromkeys(FIGURES, reason)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
