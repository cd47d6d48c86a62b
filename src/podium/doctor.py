"""`podium doctor`: what this machine has, whether Podium can work on it, and what would make it better."""

import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from podium import __version__
from podium.console import out
from podium.data.cache import cache_folder
from podium.topology import usable_cores

_MARKS = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]note[/]"}


def examine() -> bool:
    """Prints a table of findings; False when something needed is missing."""
    checks: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [
        ("Podium", lambda: (True, f"{__version__} on Python {platform.python_version()}")),
        ("torch", lambda: (torch.__version__.startswith("2.13"), f"{torch.__version__} (made for 2.13)")),
        ("processor", _processor),
        ("memory", _memory),
        ("accelerator", _accelerator),
        ("matrix products", _sgemm),
        ("cache folder", lambda: _writable(cache_folder())),
        ("this folder", lambda: _writable(Path.cwd())),
        ("wandb", lambda: _optional("wandb", "log.wandb")),
        ("neuron", lambda: _optional("neuron", "checking the simulated cell")),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    fine = True
    for name, check in checks:
        good, text = check()
        fine = fine and good is not False
        table.add_row(_MARKS[good], name, escape(text))
    out.print(table)
    return fine


def _processor() -> tuple[bool | None, str]:
    return True, f"{len(usable_cores())} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _memory() -> tuple[bool | None, str]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return (True if memory.available > 2 * 2**30 else None), text


def _accelerator() -> tuple[bool | None, str]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None, "none: training runs on the processor"
    return True, f"{torch.accelerator.device_count()} × {device.type}"


def _sgemm() -> tuple[bool | None, str]:
    """The best of a few products, as other people's load only ever makes them slower."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return True, f"{2 * size**3 / best / 1e9:.0f} GFLOP/s in float32 on {torch.get_num_threads()} threads"


def _writable(folder: Path) -> tuple[bool | None, str]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return False, f"{folder}: cannot be written: {error.strerror}"
    free_gb = shutil.disk_usage(existing).free / 2**30
    return (True if free_gb > 1 else None), f"{folder} ({free_gb:.1f} GiB free)"


def _optional(package: str, purpose: str) -> tuple[bool | None, str]:
    there = importlib.util.find_spec(package) is not None
    return (True, f"installed, for {purpose}") if there else (None, f"not installed; only needed for {purpose}")
