"""Which cores this process has."""

import os


def own_cores() -> set[int]:
    """Those it may run on: a container or a scheduler may have given it fewer than there are."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
