"""`podium doctor`: what this machine has, whether Podium can run on it, and what would improve it."""

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
from podium.kernels import registry
from podium.machine.cache_folder import cache_folder
from podium.machine.device import device_name
from podium.topology import usable_cores
from podium.ui.console import out

#: the first and the last version that the tests pass with, as in pyproject.toml
TESTED_TORCH = (2, 13), (2, 15)
_MARKS = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]note[/]"}


def examine() -> bool:
    """Print a table of findings; return False when something required is missing."""
    checks: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [
        ("Podium", lambda: (True, f"{__version__} on Python {platform.python_version()}")),
        ("torch", _torch),
        ("processor", _processor),
        ("memory", _memory),
        ("accelerator", _accelerator),
        ("matrix multiply", _sgemm),
        ("kernels", _kernels),
        ("cache folder", lambda: _writable(cache_folder())),
        ("this folder", lambda: _writable(Path.cwd())),
        ("wandb", lambda: _optional("wandb", "log.wandb")),
        ("mlflow", lambda: _optional("mlflow", "log.mlflow")),
        ("trackio", lambda: _optional("trackio", "log.trackio")),
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


def _torch() -> tuple[bool | None, str]:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    first, last = (".".join(map(str, version)) for version in TESTED_TORCH)
    return TESTED_TORCH[0] <= version <= TESTED_TORCH[1], f"{torch.__version__} (tested with {first} to {last})"


def _processor() -> tuple[bool | None, str]:
    return True, f"{len(usable_cores())} of {os.cpu_count()} cores usable, {torch.backends.cpu.get_cpu_capability()}"


def _memory() -> tuple[bool | None, str]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return (True if memory.available > 2 * 2**30 else None), text


def _accelerator() -> tuple[bool | None, str]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None, "none; training runs on the processor"
    names = [device_name(torch.device(device.type, index)) for index in range(torch.accelerator.device_count())]
    return True, ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _sgemm() -> tuple[bool | None, str]:
    """Return the best of a few products, as other load can only slow them down."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return True, f"{2 * size**3 / best / 1e9:.0f} GFLOP/s in float32 on {torch.get_num_threads()} threads"


def _kernels() -> tuple[bool | None, str]:
    """Which of our own operators training uses here, and on how many threads."""
    names = registry.in_use()
    missing, slower = sorted(registry.chosen() - set(names)), sorted(registry.KERNELS.keys() - registry.chosen())
    text = f"{len(names)} of {len(registry.KERNELS)} in use"
    text += f" ({', '.join(names)})" if not missing else f"; torch does the work of {', '.join(missing)}"
    text += f"; those of torch are as fast here as {', '.join(slower)}" if slower else ""
    if not any("llvmlite" in registry.KERNELS[name].needs for name in names):
        return None, f"{text}: llvmlite, which compiles them, is not installed"
    from podium.kernels.jit.routine import has_threads

    if not has_threads():
        return None, f"{text}, on one thread each: torch here has no GNU OpenMP whose threads they could use"
    return (None if missing else True), f"{text}, on as many threads as torch"


def _writable(folder: Path) -> tuple[bool | None, str]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return False, f"{folder} cannot be written: {error.strerror}"
    free_gb = shutil.disk_usage(existing).free / 2**30
    return (True if free_gb > 1 else None), f"{folder} ({free_gb:.1f} GiB free)"


def _optional(package: str, purpose: str) -> tuple[bool | None, str]:
    installed = importlib.util.find_spec(package) is not None
    return (
        (True, f"installed; used for {purpose}") if installed else (None, f"not installed; only needed for {purpose}")
    )
