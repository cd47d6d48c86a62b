"""The line that every result opens with: when and where it was measured."""

import datetime
import os

import torch


def when_and_where(load: float) -> str:
    """Return the line; `load` is the machine's before the measurement began (`os.getloadavg()[0]`)."""
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}; {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, load {load:.2f} at the start"
    )
