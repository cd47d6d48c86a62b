"""What every instance has published of its losses, kept by all where they share no memory.

The losses of an update travel while its last backward pass runs, and whoever completes the update has received them. So
whoever is left when an instance is lost can tell what it had computed. Used by `parallelism.py`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from podium.distributed.instances import Instances
from podium.engine.losses import PendingLosses


class SentLedgers:
    """Copies of the ledgers of all instances, filled by messages."""

    def __init__(self, instances: Instances, num_replicas: Sequence[int]) -> None:
        """Take the instances, and how many replicas each of them carries."""
        self._instances, self._num_replicas = instances, num_replicas
        self._ledgers = instances.ledgers
        self._wait: Callable[[], Tensor] | None = None
        self._start = self._num_new = 0

    def publish(self, pending: PendingLosses, update: int) -> None:
        """Begin to send what is new."""
        own = self._instances.index
        start, self._num_new = pending.num_published, pending.num - pending.num_published
        per_replica = self._num_new // self._num_replicas[own]
        self._start = start // self._num_replicas[own]
        pending.publish(self._ledgers[own], update)
        row = torch.full((1 + 2 * per_replica * max(self._num_replicas),), math.nan, dtype=torch.float64)
        if pending.is_readable:
            row[0] = self._ledgers[own][0]
            row[1 : 1 + 2 * self._num_new] = self._ledgers[own][1 + 2 * start : 1 + 2 * (start + self._num_new)]
        self._wait = self._instances.begin_gather(row)

    def receive(self) -> None:
        """Wait for what the others have sent. Collective, once the gradients are summed."""
        wait, self._wait = self._wait, None
        if wait is None:
            return
        rows, own = wait(), self._instances.index
        for index, (row, ledger, num) in enumerate(zip(rows, self._ledgers, self._num_replicas, strict=True)):
            start, num_new = self._start * num, self._num_new // self._num_replicas[own] * num
            if index == own:
                continue
            ledger[0] = row[0]
            if not math.isnan(float(row[0])):
                ledger[1 + 2 * start : 1 + 2 * (start + num_new)] = row[1 : 1 + 2 * num_new]
