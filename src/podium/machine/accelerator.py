"""What an accelerator says of itself: use, memory, power, energy, through its maker's own library.

Of NVIDIA's that is NVML. The package `nvidia-ml-py` (module `pynvml`) is optional, and loaded only where a training
runs on such a device. Of the others, torch's module for the device answers, which asks their makers' libraries. What
these do not offer stays unknown.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

Values = dict[str, float]
Reasons = dict[str, str]

FIGURES = ("accelerator_percent", "accelerator_memory_bytes", "accelerator_power_w", "accelerator_energy_j")


class Telling(Protocol):
    """What can be asked for figures."""

    #: by name, why a figure is missing
    unknown: Reasons

    def read(self) -> Values: ...


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


class OtherAccelerator:
    """One accelerator of another maker than NVIDIA, as torch's module for its kind of device tells."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """`module`: the one to ask, `torch.xpu` and the like if none is given."""
        self._device, self._module = device, module or torch.get_device_module(device)
        self.unknown: Reasons = {
            name: f"torch does not tell it of {device.type} devices"
            for name in FIGURES
            if name not in self._questions()
        }

    def read(self) -> Values:
        """Return the figures that the device gives; those that it does not are named in `unknown`."""
        found: Values = {}
        for name, question in self._questions().items():
            try:
                found[name] = question()
            except Exception as error:  # of the maker's library, or that it is not installed
                self.unknown[name] = f"torch.{self._device.type} answers {_said(error)}"
        return found

    def _questions(self) -> dict[str, Callable[[], float]]:
        module, device = self._module, self._device
        asked: dict[str, Callable[[], float]] = {}
        if hasattr(module, "utilization"):
            asked["accelerator_percent"] = lambda: float(module.utilization(device))
        if hasattr(module, "mem_get_info"):
            asked["accelerator_memory_bytes"] = lambda: _used(*module.mem_get_info(device))
        elif hasattr(module, "driver_allocated_memory"):  # MPS: of this process
            asked["accelerator_memory_bytes"] = lambda: float(module.driver_allocated_memory())
        if hasattr(module, "power_draw"):
            asked["accelerator_power_w"] = lambda: module.power_draw(device) / 1e3
        return {name: question for name, question in asked.items() if name not in getattr(self, "unknown", {})}


def accelerator_of(device: torch.device) -> Telling:
    """Return who tells about the device of a training."""
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        return Accelerator(nvml_uuid(device))
    return OtherAccelerator(device)


def nvml_uuid(device: torch.device) -> str | None:
    """Return the name by which NVML knows a device; None if it does not know it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _used(free: int, total: int) -> float:
    return float(total - free)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
