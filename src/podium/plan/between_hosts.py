"""Measures the network between hosts: the exact sums of a reduction, of several sizes, one instance on each host.

`commands/plan_network.py` starts the instances as it would those of a training; instance 0 saves what they found.
"""

import hashlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from podium.distributed.instances import Instances
from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_mapping
from podium.machine.state_folder import state_folder
from podium.plan.network import Network, fitted
from podium.runs.folder import write_json

#: bytes of the sums: short ones tell the latency, long ones the bandwidth
SIZES = (256, 4 << 10, 1 << 20, 8 << 20)
_WARM_UP, _FEWEST, _MOST = 3, 5, 200
_SECONDS = 1.0


def sum_seconds(instances: Instances, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Return the typical seconds of an exact sum by its bytes. Collective."""
    found = {}
    for size in sizes:
        flat = torch.zeros(size // 4)
        warm = [_once(instances, flat) for _ in range(_WARM_UP)]
        # All instances must make the same number of sums: that of the slowest.
        slowest = float(instances.gather(torch.tensor([min(warm)], dtype=torch.float64)).max())
        rounds = max(_FEWEST, min(_MOST, math.ceil(_SECONDS / max(1e-6, slowest))))
        typical = statistics.median(_once(instances, flat) for _ in range(rounds))
        found[size] = float(instances.gather(torch.tensor([typical], dtype=torch.float64)).max())
    return found


def _once(instances: Instances, flat: torch.Tensor) -> float:
    began = time.perf_counter()
    instances.sum_exact(flat)
    return time.perf_counter() - began


def save(hosts: Sequence[str], seconds: Mapping[int, float], when: str) -> None:
    """Keep what was measured between these hosts."""
    path = _file(hosts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {system_reason(error)}") from None
    write_json(path, {"hosts": list(hosts), "when": when, "seconds": {str(n): s for n, s in seconds.items()}})


def recalled(hosts: Sequence[str]) -> Network | None:
    """Return the network that was measured between these hosts; None if none was."""
    path = _file(hosts)
    record = read_mapping(path, "remove it, and measure again")
    if record is None:
        return None
    try:
        seconds = {int(size): float(took) for size, took in record["seconds"].items()}
        if len(seconds) < 2 or not all(size > 0 and 0 < took < math.inf for size, took in seconds.items()):
            raise ValueError
        return fitted(seconds, len(hosts), f"measured between {', '.join(hosts)} on {record['when']}")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path} is damaged: remove it, and measure again") from None


def _file(hosts: Sequence[str]) -> Path:
    name = hashlib.sha256("\n".join(sorted(hosts)).encode()).hexdigest()[:16]
    return state_folder("plans", f"network-{name}.json")
