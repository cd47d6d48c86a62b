"""Losses and metrics as (sum, count), from the device to the host; divided once, when a record is written."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.contract import Loss
from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.distributed.messages import all_gather_facts
from podium.machine.device import has_float64


@dataclass
class Sums:
    """(sum, count) of the loss and metrics over updates, as separate parts.

    `math.fsum` adds the parts without intermediate rounding, so their order and grouping do not matter.
    """

    parts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, name: str, total: float, count: int) -> None:
        self.parts.setdefault(name, []).append((total, count))

    def extend(self, other: "Sums") -> None:
        for name, parts in other.parts.items():
            self.parts.setdefault(name, []).extend(parts)

    def means(self) -> dict[str, float]:
        return {
            name: _fsum(total for total, _ in parts) / max(1, sum(count for _, count in parts))
            for name, parts in self.parts.items()
        }


def _fsum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or beyond the range of a float
        return math.nan


class PendingLosses:
    """Losses still on the device, to be transferred to the host all at once."""

    def __init__(self) -> None:
        self._values: list[Tensor | float] = []
        self._labels: list[tuple[str, int]] = []
        #: how many belong to complete updates, and how many others can read
        self._num_complete = self._num_published = 0
        #: whether others can read all that was published
        self.is_readable = True

    @property
    def num(self) -> int:
        """How many values are pending."""
        return len(self._labels)

    @property
    def num_published(self) -> int:
        """How many of them others can read."""
        return self._num_published

    def publish(self, ledger: Tensor, update: int) -> None:
        """Write what is new to where other instances can read it even if this one ends: the `update` that all begins
        with, then pairs of sum and count."""
        start, self._num_published = self._num_published, len(self._labels)
        if start == 0:
            ledger.numpy()[0] = update
        pairs = [
            number
            for value, (_, count) in zip(self._values[start:], self._labels[start:], strict=True)
            for number in (value, count)
        ]
        if 1 + 2 * self._num_published > ledger.numel() or any(isinstance(number, Tensor) for number in pairs):
            self.is_readable = False
        else:
            ledger.numpy()[1 + 2 * start : 1 + 2 * self._num_published] = pairs

    def complete(self) -> None:
        """Note that all so far are of complete updates."""
        self._num_complete = len(self._labels)

    def rescued(self, ledgers: Sequence[Tensor], index: int, num_updates: int, num_replicas: Sequence[int]) -> Sums:
        """Return what `collect_alike` would, of complete updates, from what the instances have published: without a
        word from any of them. This one is number `index`.

        Raises InstanceLost where one has gone on to publish what comes next, as it has collected these.
        """
        num, first = self._num_complete, float(ledgers[index][0])
        names = [name for name, _ in self._labels[:num]]
        if not num_updates or not names:
            return Sums()
        per_replica = num // num_updates // num_replicas[index]
        rows = [
            ledger[1 : 1 + 2 * num_updates * of_one * per_replica].clone().reshape(num_updates, -1, 2)
            for ledger, of_one in zip(ledgers, num_replicas, strict=True)
        ]
        if any(float(ledger[0]) != first for ledger in ledgers):
            raise InstanceLost(None, "the losses since the last record are lost with it")
        values = torch.cat(rows, dim=1).reshape(-1, 2)
        return _sums(names[:per_replica] * (num_updates * sum(num_replicas)), values)

    def add(self, loss: Loss) -> None:
        self._add("loss", loss.sum, loss.count)
        for name, (total, count) in loss.metrics.items():
            self._add(name, total, count)

    def _add(self, name: str, total: Tensor, count: int) -> None:
        # What is on the host is read at once. A small tensor that stays would lie between the large blocks of this pass
        # and keep glibc's allocator from using them again: validation would take new memory for every micro-batch.
        self._values.append(total.item() if total.device.type == "cpu" else total.detach())
        self._labels.append((name, count))

    def collect(self, instances: Instances | None = None, num_updates: int = 1) -> Sums:
        """Wait for the device and return the values of all instances, by update.

        Instances may have any number of parts, including none. Takes two messages.
        """
        names, values = self._take()
        if instances is None or instances.count == 1:
            return _sums(names, values)
        sums = Sums()
        # JSON preserves every float exactly (in Python, also nan and infinities), and executes nothing when read.
        every = all_gather_facts(instances, [names, values.tolist()])
        for update in range(num_updates):
            for their_names, their_values in every:
                each = len(their_names) // max(1, num_updates)
                part = slice(update * each, (update + 1) * each)
                sums.extend(_sums(their_names[part], torch.tensor(their_values[part], dtype=torch.float64).view(-1, 2)))
        return sums

    def collect_alike(self, instances: Instances, num_updates: int, num_replicas: Sequence[int]) -> Sums:
        """Do the same where every replica has parts of the same names in the same order, as in training. Takes one
        message. `num_replicas`: how many each instance carries.

        Parts are in the order in which a single instance would have them: by update, then by replica. All stays pending
        where an instance is lost meanwhile.
        """
        names, values = self._read()
        if instances.count == 1 or not names:
            self._forget()
            return _sums(names, values)
        per_replica = len(names) // num_updates // num_replicas[instances.index]
        rows = values.new_zeros(num_updates, max(num_replicas) * per_replica, 2)  # of one shape on all instances
        own = rows[:, : num_replicas[instances.index] * per_replica]
        own.copy_(values.view(own.shape))
        every = zip(instances.gather(rows), num_replicas, strict=True)
        self._forget()
        gathered = torch.cat([row[:, : num * per_replica] for row, num in every], dim=1)
        return _sums(names[:per_replica] * (num_updates * sum(num_replicas)), gathered.reshape(-1, 2))

    def _take(self) -> tuple[list[str], Tensor]:
        """Return what `_read` does; nothing is pending afterwards."""
        found = self._read()
        self._forget()
        return found

    def _forget(self) -> None:
        self._values, self._labels = [], []
        self._num_complete = self._num_published = 0
        self.is_readable = True

    def _read(self) -> tuple[list[str], Tensor]:
        """Return (names, a (parts, 2) tensor of sums and counts in float64, which holds them exactly)."""
        names = [name for name, _ in self._labels]
        values = torch.zeros(len(names), 2, dtype=torch.float64)
        if names:
            tensors = [value for value in self._values if isinstance(value, Tensor)]
            if len(tensors) == len(self._values):
                alike = all(value.dtype == tensors[0].dtype for value in tensors)
                if not alike and has_float64(tensors[0].device):
                    tensors = [value.double() for value in tensors]
                elif not alike:  # one by one
                    tensors = [value.cpu().double() for value in tensors]
                # A single transfer from the device, however many values there are.
                values[:, 0] = torch.stack(tensors)
            else:
                values[:, 0] = torch.tensor([float(value) for value in self._values], dtype=torch.float64)
            values[:, 1] = torch.tensor([count for _, count in self._labels], dtype=torch.float64)
        return names, values


def _sums(names: Iterable[str], values: Tensor) -> Sums:
    sums = Sums()
    for name, (total, count) in zip(names, values.tolist(), strict=True):
        sums.add(name, total, int(count))
    return sums
