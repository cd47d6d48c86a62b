"""The instances (processes) of a run and how they talk to each other: gloo process groups of `torch.distributed`.

`train.py` joins them and hands them to the engine and to validation. Values that must not depend on the number of
instances only ever meet in `sum_exact`, where the order of additions is ours, or in `gather`, where nothing is added.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

#: large buffers travel in pieces of so many bytes, so that one is added while the next is on its way
_PIECE_BYTES = 4 << 20
#: bytes that are worth sending to save one round of messages
_ROUND_BYTES = 1 << 18
#: above this the additions saved by halving outweigh the rounds (2 instances, where both send the same bytes)
_DOUBLING_BYTES = 1 << 20
#: lane n uses tag _FIRST_TAG + n; those below are free for others
_FIRST_TAG = 16


class InstanceLost(RuntimeError):
    """Another instance did not answer: it died, hangs, or lost one that it waits for itself."""

    def __init__(self, instance: int | None, reason: str) -> None:
        super().__init__(f"{'another instance' if instance is None else f'instance {instance}'} is lost: {reason}")
        self.instance = instance


class Instances:
    """This process among `count` of them, which carry the aligned blocks of replicas in order of `index`.

    Collective calls: every instance makes the same ones in the same order. `sum_exact` talks by tagged messages alone,
    which gloo keeps apart from all else, so other threads may call it while the main thread uses the rest. There is one
    group for all of it, as each has a thread of its own that wakes a hundred times a second.

    Where replicas are cut into stages, the instances of a run are also two kinds of parts, each of this class again
    (`divided`): those that carry the same stage, and those that carry the stages of the same replicas.
    """

    def __init__(
        self,
        index: int,
        count: int,
        group: dist.ProcessGroup | None,
        timeout_s: float = math.inf,
        num_mates: int = 1,
        members: Sequence[int] | None = None,
    ) -> None:
        self.index = index
        self.count = count
        self.timeout_s = timeout_s
        #: so many, in order, are on one host and may share memory
        self.num_mates = num_mates
        #: None when there is only one instance
        self.group = group
        #: what these are called among all instances of the run
        self.members = tuple(members or range(count))
        self._received: dict[tuple[torch.dtype, int], Tensor] = {}

    @classmethod
    def alone(cls) -> Self:
        """One instance, no process group at all."""
        return cls(0, 1, None)

    @classmethod
    def join(cls, store: dist.Store, index: int, count: int, timeout_s: float, num_mates: int = 1) -> Self:
        """Meets the others at `store`. A message that takes longer than `timeout_s` raises InstanceLost.

        `num_mates` of them are on each host, in order.
        """
        if count == 1:
            return cls.alone()
        assert count % num_mates == 0
        timeout = timedelta(seconds=timeout_s)
        with naming_who_is_lost(None):
            dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=timeout)
        return cls(index, count, dist.group.WORLD, timeout_s, num_mates)

    def divided(self, num_stages: int) -> "tuple[Instances, Instances]":
        """(those that carry the same stage of other replicas, those that carry the stages of the same replicas).

        Stages of the same replicas are neighbours. All instances call it together.
        """
        timeout = timedelta(seconds=self.timeout_s) if self.count > 1 else None
        per_host = self.num_mates // num_stages if self.num_mates % num_stages == 0 else 1

        def part(members: range, num_mates: int) -> "Instances | None":
            group = dist.new_group(members, timeout=timeout, backend="gloo") if len(members) > 1 else None
            if self.index not in members:
                return None
            return Instances(members.index(self.index), len(members), group, self.timeout_s, num_mates, members)

        with naming_who_is_lost(None):
            same_stage = [part(range(stage, self.count, num_stages), per_host) for stage in range(num_stages)]
            same_replicas = [part(range(first, first + num_stages), 1) for first in range(0, self.count, num_stages)]
        (peers,) = filter(None, same_stage)
        (line,) = filter(None, same_replicas)
        return peers, line

    def sum_exact(self, flat: Tensor, lane: int = 0, distance: int = 1) -> None:
        """Sums `flat` (one-dimensional, contiguous, the same length everywhere) over the instances, in place.

        Threads may do so at the same time, each in a lane of its own. `distance`: it is a sum over aligned blocks of
        so many instances already, and only those that many apart are to be joined.

        Partners are 1, 2, 4 … apart, so the additions are the upper levels of the tree over replicas, and all
        instances end with the same bits (a + b = b + a). Short buffers: recursive doubling, everything to every
        partner. Long ones: recursive halving, half of what is left to each partner, then the mirrored all-gather.
        """
        if distance >= self.count or flat.numel() == 0:
            return
        assert self.count & (self.count - 1) == 0, "the tree joins a power of two of instances"
        assert flat.dim() == 1
        assert flat.is_contiguous()
        if self._doubling_pays(flat.numel() * flat.element_size(), self.count // distance):
            for _ in self._double(flat, self._received_in(flat, flat.numel(), lane), lane, distance):
                pass
            return
        size = max(1, _PIECE_BYTES // flat.element_size())
        pieces = flat.split(size)
        half = (size + 1) // 2
        received = self._received_in(flat, half * len(pieces), lane).split(half)
        steps = [self._halve(piece, into, lane, distance) for piece, into in zip(pieces, received, strict=True)]
        while steps:  # every piece posts its messages before the first one waits
            steps = [step for step in steps if next(step, False)]

    def gather(self, values: Tensor) -> Tensor:
        """(count, *values.shape): what every instance gave, in their order. Shapes are the same everywhere."""
        if self.count == 1:
            return values.unsqueeze(0)
        gathered = values.new_empty((self.count, *values.shape))
        if values.numel():
            with naming_who_is_lost(None):
                dist.all_gather_single(gathered.view(-1), values.contiguous().view(-1), group=self.group)
        return gathered

    def barrier(self) -> None:
        """Returns when every instance has called it."""
        if self.count > 1:
            with naming_who_is_lost(None):
                dist.barrier(group=self.group)

    def close(self) -> None:
        """Leaves the groups; nothing can be said afterwards."""
        if self.group is not None:
            self.group = None
            dist.destroy_process_group()

    @staticmethod
    def _doubling_pays(num_bytes: int, count: int) -> bool:
        """Doubling sends log2(p) · n bytes in log2(p) rounds, halving 2 (1 - 1/p) · n in twice as many."""
        num_rounds = count.bit_length() - 1
        extra = (num_rounds - 2 * (1 - 1 / count)) * num_bytes
        return num_bytes <= _DOUBLING_BYTES and extra <= num_rounds * _ROUND_BYTES

    def _received_in(self, flat: Tensor, length: int, lane: int) -> Tensor:
        """The one buffer of a lane that messages are received in, grown as needed."""
        buffer = self._received.get((flat.dtype, lane))
        if buffer is None or buffer.numel() < length or buffer.device != flat.device:
            buffer = torch.empty(length, dtype=flat.dtype, device=flat.device)
            self._received[flat.dtype, lane] = buffer
        return buffer[:length]

    # Both are generators that stop at `yield` when their messages are posted and have to be waited for.

    def _double(self, flat: Tensor, received: Tensor, lane: int, distance: int) -> Iterator[bool]:
        while distance < self.count:
            exchange = self._posted(lane, self.index ^ distance, flat, received)
            yield True
            exchange.wait()
            flat.add_(received)
            distance *= 2

    def _halve(self, flat: Tensor, received: Tensor, lane: int, distance: int) -> Iterator[bool]:
        kept: list[tuple[Tensor, Tensor]] = []  # (mine, the partner's), from the whole to the smallest part
        part = flat
        while distance < self.count:
            mid = (part.numel() + 1) // 2
            mine, theirs = part[:mid], part[mid:]
            if self.index & distance:
                mine, theirs = theirs, mine
            into = received[: mine.numel()]
            exchange = self._posted(lane, self.index ^ distance, theirs, into)
            yield True
            exchange.wait()
            mine.add_(into)
            kept.append((mine, theirs))
            part, distance = mine, distance * 2
        for mine, theirs in reversed(kept):
            distance //= 2
            exchange = self._posted(lane, self.index ^ distance, mine, theirs)
            yield True
            exchange.wait()

    def _posted(self, lane: int, partner: int, sent: Tensor, received: Tensor) -> "_Exchange":
        assert self.group is not None, "closed"
        name = self.members[partner]
        with naming_who_is_lost(name):
            messages = []
            # Messages between two instances arrive in the order they are sent, so one tag per lane
            # does. The group's own methods: dist.isend and dist.irecv do the same after many checks.
            if received.numel():
                messages.append(self.group.recv([received], partner, _FIRST_TAG + lane))
            if sent.numel():
                messages.append(self.group.send([sent], partner, _FIRST_TAG + lane))
        return _Exchange(name, messages)


class _Exchange:
    """A message each way, under way."""

    def __init__(self, partner: int, messages: list[dist.Work]) -> None:
        self._partner, self._messages = partner, messages

    def wait(self) -> None:
        with naming_who_is_lost(self._partner):
            for message in self._messages:
                message.wait()


@contextmanager
def naming_who_is_lost(instance: int | None) -> Iterator[None]:
    """Around messages to or from `instance` (None: any of them): gloo's errors become InstanceLost."""
    try:
        yield
    except RuntimeError as error:  # gloo's; a timeout of the store is one too
        raise InstanceLost(instance, str(error)) from error
