"""The instances (processes) of a run and how they talk to each other: in memory they share where all are on one host,
else, and for what only `torch.distributed` does, over its gloo process groups.

`train.py` joins them and hands them to the engine and to validation. Values that must not depend on the number of
instances only ever meet in `sum_exact`, where the order of additions is ours, or in `gather`, where nothing is added.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count as numbers
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from podium.engine.lost import naming_who_is_lost
from podium.engine.mates import Mates

#: large buffers travel in pieces of so many bytes, so that one is added while the next is on its way
_PIECE_BYTES = 4 << 20
#: bytes that are worth sending to save one round of messages
_ROUND_BYTES = 1 << 18
#: above this the additions saved by halving outweigh the rounds (2 instances, where both send the same bytes)
_DOUBLING_BYTES = 1 << 20
#: lane n uses tag _FIRST_TAG + n; those below are free for others
_FIRST_TAG = 16
#: what mates tell each other goes through buffers of so many bytes
_MAIL_BYTES = 1 << 20


class Instances:
    """This process among `count` of them, which carry the aligned blocks of replicas in order of `index`.

    Collective calls: every instance makes the same ones in the same order. `sum_exact` talks by tagged messages alone,
    which gloo keeps apart from all else, so other threads may call it while the main thread uses the rest.

    Where replicas are cut into stages, the instances of a run are also two kinds of parts, each of this class again
    (`divided`): those that carry the same stage, and those that carry the stages of the same replicas.
    """

    def __init__(
        self,
        index: int,
        count: int,
        connect: Callable[[], dist.ProcessGroup] | None = None,
        timeout_s: float = math.inf,
        num_mates: int = 1,
        members: Sequence[int] | None = None,
        mates: Mates | None = None,
    ) -> None:
        """`connect` makes the gloo group when it is first asked for; `mates`: all instances, where they share memory,
        with two buffers of _MAIL_BYTES."""
        self.index = index
        self.count = count
        self.timeout_s = timeout_s
        #: so many, in order, are on one host and may share memory
        self.num_mates = num_mates
        #: what these are called among all instances of the run
        self.members = tuple(members or range(count))
        self._connect = connect
        self._group: dist.ProcessGroup | None = None
        self._mates, self._num_letters = mates, 0
        self._received: dict[tuple[torch.dtype, int], Tensor] = {}

    @classmethod
    def alone(cls) -> Self:
        """One instance, which has nobody to talk to."""
        return cls(0, 1)

    @classmethod
    def join(cls, store: dist.Store, index: int, count: int, timeout_s: float, num_mates: int = 1) -> Self:
        """Meets the others at `store`. A message that takes longer than `timeout_s` raises InstanceLost.

        `num_mates` of them are on each host, in order.
        """
        if count == 1:
            return cls.alone()
        assert count % num_mates == 0
        timeout = timedelta(seconds=timeout_s)

        def connect() -> dist.ProcessGroup:
            dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=timeout)
            assert dist.group.WORLD is not None
            return dist.group.WORLD

        mates = None
        if num_mates == count:
            with naming_who_is_lost(None):
                gather = _gathering(store, index, count, timeout)
                mail = [(_MAIL_BYTES, torch.uint8)] * 2
                mates = Mates.open(gather, index, count, range(count), timeout_s, mail)
        instances = cls(index, count, connect, timeout_s, num_mates, mates=mates)
        if mates is None:
            instances.group()
        return instances

    def group(self) -> dist.ProcessGroup:
        """gloo's group of these instances. Collective the first time. Not made before something needs it: it has a
        thread that wakes a hundred times a second, which takes 0.4 % of a core from the training."""
        if self._group is None:
            assert self._connect is not None, "alone, or closed"
            with naming_who_is_lost(None):
                self._group = self._connect()
        return self._group

    def divided(self, num_stages: int) -> "tuple[Instances, Instances]":
        """(those that carry the same stage of other replicas, those that carry the stages of the same replicas).

        Stages of the same replicas are neighbours. All instances call it together.
        """
        self.group()
        timeout = timedelta(seconds=self.timeout_s)
        per_host = self.num_mates // num_stages if self.num_mates % num_stages == 0 else 1

        def part(members: range, num_mates: int) -> "Instances | None":
            group = dist.new_group(members, timeout=timeout, backend="gloo") if len(members) > 1 else None
            if self.index not in members:
                return None
            connect = None if group is None else lambda: group
            return Instances(members.index(self.index), len(members), connect, self.timeout_s, num_mates, members)

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
        if values.numel() and self._mates is not None:
            rows = gathered.view(self.count, -1).view(torch.uint8)
            own = rows[self.index]
            own.copy_(values.reshape(-1).view(torch.uint8))
            for letters, part in self._letters(own):
                for row, letter in zip(rows, letters, strict=True):
                    row[part].copy_(letter)
        elif values.numel():
            with naming_who_is_lost(None):
                dist.all_gather_single(gathered.view(-1), values.contiguous().view(-1), group=self.group())
        return gathered

    def broadcast(self, values: Tensor) -> None:
        """`values` (without gaps, the same shape everywhere) become those of instance 0, in place."""
        if self.count == 1 or not values.numel():
            return
        if self._mates is not None:
            flat = values.view(-1).view(torch.uint8)
            for letters, part in self._letters(flat if self.index == 0 else flat[:0], flat.numel()):
                flat[part].copy_(letters[0])
        else:
            with naming_who_is_lost(0):
                dist.broadcast(values, group=self.group(), group_src=0)

    def barrier(self) -> None:
        """Returns when every instance has called it."""
        if self._mates is not None:
            self._mates.meet()
        elif self.count > 1:
            with naming_who_is_lost(None):
                dist.barrier(group=self.group())

    def close(self) -> None:
        """Leaves the groups; nothing can be said afterwards."""
        self._connect = self._mates = None
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def _letters(self, own: Tensor, length: int = 0) -> Iterator[tuple[list[Tensor], slice]]:
        """Through the mail: `own` bytes, of which all mates have as many, piece by piece: (that of every mate, its
        place). Those who have nothing to say give an empty one and the `length`.

        There are two buffers in turn, so one meeting does: whoever comes to it has read the piece before.
        """
        assert self._mates is not None
        for start in range(0, length or own.numel(), _MAIL_BYTES):
            part = slice(start, min(start + _MAIL_BYTES, length or own.numel()))
            turn, self._num_letters = self._num_letters % 2, self._num_letters + 1
            size = part.stop - part.start
            if own.numel():
                self._mates.flats[self.index][turn][:size].copy_(own[part])
            self._mates.meet()
            yield [flats[turn][:size] for flats in self._mates.flats], part

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
        name = self.members[partner]
        with naming_who_is_lost(name):
            messages = []
            # Messages between two instances arrive in the order they are sent, so one tag per lane
            # does. The group's own methods: dist.isend and dist.irecv do the same after many checks.
            if received.numel():
                messages.append(self.group().recv([received], partner, _FIRST_TAG + lane))
            if sent.numel():
                messages.append(self.group().send([sent], partner, _FIRST_TAG + lane))
        return _Exchange(name, messages)


class _Exchange:
    """A message each way, under way."""

    def __init__(self, partner: int, messages: list[dist.Work]) -> None:
        self._partner, self._messages = partner, messages

    def wait(self) -> None:
        with naming_who_is_lost(self._partner):
            for message in self._messages:
                message.wait()


def _gathering(store: dist.Store, index: int, count: int, timeout: timedelta) -> Callable[[Tensor], Tensor]:
    """`Instances.gather` for those who have nothing but a store yet."""
    calls = numbers()

    def gather(values: Tensor) -> Tensor:
        call = next(calls)
        keys = [f"call-{call}/{place}" for place in range(count)]
        store.set(keys[index], json.dumps(values.tolist()))
        store.wait(keys, timeout)
        return torch.tensor([json.loads(store.get(key)) for key in keys], dtype=values.dtype)

    return gather
