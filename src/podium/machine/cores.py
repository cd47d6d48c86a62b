"""Which cores this process has, and which of them share memory."""

import os
from collections.abc import Sequence
from pathlib import Path


def own_cores() -> set[int]:
    """Those it may run on: a container or a scheduler may have given it fewer than there are."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def numa_nodes() -> dict[int, int]:
    """The NUMA node of every core, as far as the system says."""
    return read_numa_nodes(
        [path.read_text() for path in sorted(Path("/sys/devices/system/node").glob("node*/cpulist"))]
    )


def read_numa_nodes(core_lists: Sequence[str]) -> dict[int, int]:
    """The node of every core; `core_lists` are the nodes' cores as the system writes them: `0-3,8`."""
    return {
        core: node
        for node, text in enumerate(core_lists)
        for first, _, last in (part.partition("-") for part in text.strip().split(",") if part)
        for core in range(int(first), int(last or first) + 1)
    }
