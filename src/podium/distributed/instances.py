"""The instances (processes) of a run and how they communicate: through shared memory when all are on one host,
otherwise, and for whatever only `torch.distributed` can do, over its gloo process groups. Tensors on an accelerator
travel by the device's own backend (`device_messages.py`), and never by gloo.

`train.py` joins them and passes them to the engine and to validation. Values that must not depend on the number of
instances are only combined in `sum_exact`, which fixes the order of additions, or in `gather`, which adds nothing.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from podium.distributed import device_messages
from podium.distributed.closed_ports import Connections, only_own_connections
from podium.distributed.connecting import connected, gather_through
from podium.distributed.lost import naming_lost_instance
from podium.distributed.regrouping import Membership
from podium.distributed.shared_memory import SharedMemory
from podium.distributed.watched_waits import WatchedWaits

#: large buffers are sent in pieces of this many bytes, so that one is added while the next is in transit
PIECE_BYTES = 4 << 20
#: number of extra bytes worth sending to save one round of messages
ROUND_BYTES = 1 << 18
#: above this, the additions that halving saves outweigh its extra rounds (2 instances; both ways send the same bytes)
DOUBLING_BYTES = 1 << 20
#: lane n uses tag FIRST_TAG + n; lower tags are free for other messages
FIRST_TAG = 16
#: size in bytes of the shared-memory buffers for `gather` and `broadcast`
EXCHANGE_BYTES = 1 << 20
#: numbers that each instance can keep where the others can read them, even after its end
LEDGER_NUMBERS = 1 << 16
#: how long waits may take to end once their connections are broken off
_BREAK_S = 0.2


class Instances:
    """This process among `count` instances, which carry the blocks of replicas in order of `index`.

    Methods are collective: every instance makes the same calls in the same order. `sum_exact` uses tagged messages
    only, which gloo keeps separate from everything else, so other threads may call it while the main thread uses the
    other methods.

    Where replicas are cut into stages, the instances of a run also form two kinds of groups, again of this class
    (`split_groups`): the data-parallel group (same stage) and the pipeline group (stages of the same replicas).
    """

    def __init__(
        self,
        index: int,
        count: int,
        connect: Callable[[], dist.ProcessGroup] | None = None,
        timeout_s: float = math.inf,
        host_sizes: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
        shared_memory: SharedMemory | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Create one instance's view of a group.

        `connect` makes the group when it is first needed; `shared_memory`, given where all instances share memory, has
        two buffers of EXCHANGE_BYTES and one of LEDGER_NUMBERS. `device`: where this instance computes; the CPU if it
        is not given.
        """
        self.device = device or torch.device("cpu")
        #: how these form another group with whoever is left, where whoever started them can do that
        self.membership: Membership | None = None
        self.index = index
        self.count = count
        self.timeout_s = timeout_s
        #: how many consecutive instances are on each host, and may share memory
        self.host_sizes = tuple(host_sizes or (1,) * count)
        #: the indices of these instances among all instances of the run
        self.members = tuple(members or range(count))
        self._connect = connect
        self._group: dist.ProcessGroup | None = None
        self._connections = Connections()
        self._waits = WatchedWaits()
        self._received_ledgers: list[Tensor] = []
        self._shared, self._num_exchanges = shared_memory, 0
        self._received: dict[tuple[torch.dtype, int], Tensor] = {}

    @classmethod
    def alone(cls) -> Self:
        """Return a group of one instance."""
        return cls(0, 1)

    @classmethod
    def join(
        cls,
        store: dist.Store,
        index: int,
        count: int,
        timeout_s: float,
        host_sizes: Sequence[int] | None = None,
        device: torch.device | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> Self:
        """Join the other instances through `store`. A message that takes longer than `timeout_s` raises InstanceLost.

        `host_sizes`: how many consecutive instances are on each host; one if it is not given. `device`: where this
        instance computes. `is_over`: whether this group will not come about, as one of its instances has been lost.
        """
        if count == 1:
            return cls.alone()
        backend = device_messages.backend_for(device or torch.device("cpu"))
        connect = partial(connected, store, index, count, timeout_s, backend, is_over)
        shared_memory = None
        if host_sizes is not None and len(host_sizes) == 1:
            with naming_lost_instance(None):
                gather = gather_through(store, index, count, timeout_s, is_over or (lambda: False))
                sizes = [[*[(EXCHANGE_BYTES, torch.uint8)] * 2, (LEDGER_NUMBERS, torch.float64)]] * count
                shared_memory = SharedMemory.open(gather, index, range(count), range(count), timeout_s, sizes)
        instances = cls(index, count, connect, timeout_s, host_sizes, shared_memory=shared_memory, device=device)
        if shared_memory is None:
            if is_over is not None:  # none connects before all are there: that cannot be interrupted
                with naming_lost_instance(None):
                    gather_through(dist.PrefixStore("there", store), index, count, timeout_s, is_over)(torch.zeros(1))
            instances.group()
        return instances

    @property
    def neighbours(self) -> range:
        """The instances of this one's host."""
        ends = zip(self.host_sizes, accumulate(self.host_sizes), strict=True)
        return next(range(stop - size, stop) for size, stop in ends if self.index < stop)

    def group(self) -> dist.ProcessGroup:
        """Return the process group of these instances; collective the first time.

        Created only when needed: gloo has a thread that wakes a hundred times a second, which takes 0.4 % of a core
        from the training.
        """
        if self._group is None:
            assert self._connect is not None, "alone, or closed"
            with naming_lost_instance(None), only_own_connections() as self._connections:
                self._group = self._connect()
                device_messages.open_for(self._group, self.device)
        return self._group

    def split_groups(self, num_stages: int) -> "tuple[Instances, Instances]":
        """Return (data-parallel group, pipeline group): the instances that carry the same stage of other replicas,
        and those that carry the stages of the same replicas.

        Stages of the same replicas are on consecutive instances. Collective.
        """
        self.group()
        timeout, backend = timedelta(seconds=self.timeout_s), device_messages.backend_for(self.device)
        whole = all(size % num_stages == 0 for size in self.host_sizes)  # all stages of a replica are on one host
        per_host = [size // num_stages for size in self.host_sizes] if whole else None

        def part(members: range, host_sizes: Sequence[int] | None) -> "Instances | None":
            group = dist.new_group(members, timeout=timeout, backend=backend) if len(members) > 1 else None
            if self.index not in members:
                return None
            connect = None if group is None else lambda: group
            index = members.index(self.index)
            return Instances(index, len(members), connect, self.timeout_s, host_sizes, members, device=self.device)

        with naming_lost_instance(None), only_own_connections():
            same_stage = [part(range(stage, self.count, num_stages), per_host) for stage in range(num_stages)]
            same_replicas = [part(range(first, first + num_stages), None) for first in range(0, self.count, num_stages)]
        (data_group,) = filter(None, same_stage)
        (pipeline_group,) = filter(None, same_replicas)
        return data_group, pipeline_group

    def sum_exact(self, flat: Tensor, lane: int = 0, distance: int = 1) -> None:
        """Sum `flat` (one-dimensional, contiguous, the same length everywhere) over the instances, in place.

        Several threads may call this at the same time, each in its own lane. `distance`: `flat` is already the sum
        over an aligned block of this many instances, so only instances that far apart have to be combined.

        Partners are 1, 2, 4 … apart, so the additions are the upper levels of the tree over replicas, and all
        instances end with the same bits (a + b = b + a). Short buffers use recursive doubling: the whole buffer goes
        to every partner. Long ones use recursive halving: half of what is left goes to each partner, followed by the
        mirrored all-gather.
        """
        if distance >= self.count or flat.numel() == 0:
            return
        assert self.count & (self.count - 1) == 0, "the tree joins a power of two of instances"
        assert flat.dim() == 1
        assert flat.is_contiguous()
        if self.doubling_pays(flat.numel() * flat.element_size(), self.count // distance):
            for _ in self._double(flat, self._received_in(flat, flat.numel(), lane), lane, distance):
                pass
            return
        size = max(1, PIECE_BYTES // flat.element_size())
        pieces = flat.split(size)
        half = (size + 1) // 2
        received = self._received_in(flat, half * len(pieces), lane).split(half)
        steps = [self._halve(piece, into, lane, distance) for piece, into in zip(pieces, received, strict=True)]
        while steps:  # every piece posts its messages before the first one waits
            steps = [step for step in steps if next(step, False)]

    def gather(self, values: Tensor) -> Tensor:
        """Return the `values` of all instances in their order, as (count, *values.shape). Shapes must be equal."""
        if self.count == 1:
            return values.unsqueeze(0)
        assert values.device.type == "cpu", "a tensor of an accelerator among the messages of control"
        gathered = values.new_empty((self.count, *values.shape))
        if values.numel() and self._shared is not None:
            rows = gathered.view(self.count, -1).view(torch.uint8)
            own = rows[self.index]
            own.copy_(values.reshape(-1).view(torch.uint8))
            for pieces, part in self.exchange(own):
                for row, piece in zip(rows, pieces, strict=True):
                    row[part].copy_(piece)
        elif values.numel():
            with naming_lost_instance(None):
                flat = values.contiguous().view(-1)
                work = dist.all_gather_single(gathered.view(-1), flat, group=self.group(), async_op=True)
                self.wait_for([work])
        return gathered

    def broadcast(self, values: Tensor, source: int = 0, *, takes: bool = True) -> None:
        """Overwrite `values` (contiguous, the same shape everywhere) with those of instance `source`; not on an
        instance that does not take them, if they are in shared memory."""
        if self.count == 1 or not values.numel():
            return
        assert values.device.type == "cpu", "a tensor of an accelerator among the messages of control"
        if self._shared is not None:
            flat = values.view(-1).view(torch.uint8)
            for pieces, part in self.exchange(flat if self.index == source else flat[:0], flat.numel()):
                if takes:
                    flat[part].copy_(pieces[source])
        else:
            with naming_lost_instance(self.members[source]):
                self.wait_for([dist.broadcast(values, group=self.group(), group_src=source, async_op=True)])

    def barrier(self) -> None:
        """Return when every instance has called this method."""
        if self._shared is not None:
            self._shared.barrier()
        elif self.count > 1:
            with naming_lost_instance(None):
                self.wait_for([dist.barrier(group=self.group(), async_op=True)])

    @property
    def ledgers(self) -> list[Tensor]:
        """LEDGER_NUMBERS of each instance that all can read, even those of one that has ended. What was written before
        a barrier can be read after it. Where instances share no memory, these are copies (`engine/ledgers.py`); there
        are none where they cannot go on without one another."""
        if self._shared is not None:
            return [flats[2] for flats in self._shared.flats]
        if self.membership is not None and self.count > 1 and not self._received_ledgers:
            self._received_ledgers = [torch.zeros(LEDGER_NUMBERS, dtype=torch.float64) for _ in range(self.count)]
        return self._received_ledgers

    def begin_gather(self, values: Tensor) -> Callable[[], Tensor] | None:
        """Begin what `gather` does where instances share no memory, by messages; return what waits for the result."""
        if self._shared is not None or self.count == 1:
            return None
        gathered, group = values.new_empty((self.count, *values.shape)), self.group()
        with naming_lost_instance(None):
            work = dist.all_gather_single(gathered.view(-1), values.view(-1), group=group, async_op=True)

        def wait() -> Tensor:
            with naming_lost_instance(None):
                self.wait_for([work])
            return gathered

        return wait

    @property
    def share_memory(self) -> bool:
        """Whether all of them are on one host, and read one another's memory."""
        return self._shared is not None

    @property
    def uses_messages(self) -> bool:
        """Whether something has been sent that is not in shared memory."""
        return self._group is not None

    def leave(self) -> None:
        """Take no further part: whoever waits for this instance, or does so later, raises InstanceLost."""
        if self._shared is not None:
            self._shared.leave()
        if self._group is not None and self.membership is not None:
            self._connections.shut()
            if not self._waits.end(_BREAK_S):
                # The end of a group waits for its threads: this one never ends, and stays.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._connect = self._group = None
            dist.destroy_process_group()

    def close(self) -> None:
        """Leave the groups; no communication is possible afterwards."""
        self._connect = self._shared = None
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def wait_for(self, works: Sequence[dist.Work]) -> None:
        """Wait for messages of this group: all waits come through here. Where the others can go on without an instance,
        none lasts longer than until one is lost."""
        if self.membership is None or self.device.type != "cpu":
            for work in works:
                work.wait()
        else:
            self._waits.wait(works, self.timeout_s, self.membership.has_lost)

    def exchange(self, own: Tensor, length: int = 0) -> Iterator[tuple[list[Tensor], slice]]:
        """Exchange the bytes `own` through shared memory, piece by piece; yield (the pieces of all instances, their
        slice of the whole). All instances pass the same number of bytes; one that only receives passes an empty tensor
        and the `length`.

        Two buffers alternate, so one barrier per piece is enough: an instance that reaches it has read the previous
        piece.
        """
        assert self._shared is not None
        for start in range(0, length or own.numel(), EXCHANGE_BYTES):
            part = slice(start, min(start + EXCHANGE_BYTES, length or own.numel()))
            buffer, self._num_exchanges = self._num_exchanges % 2, self._num_exchanges + 1
            size = part.stop - part.start
            if own.numel():
                self._shared.flats[self.index][buffer][:size].copy_(own[part])
            self._shared.barrier()
            yield [flats[buffer][:size] for flats in self._shared.flats], part

    def post(
        self, sent: Sequence[device_messages.Message], received: Sequence[device_messages.Message]
    ) -> list[dist.Work]:
        """Post messages of tensors on this instance's device as one batch; return what to wait for."""
        with naming_lost_instance(None):
            return device_messages.post(self.group(), sent, received)

    @staticmethod
    def doubling_pays(num_bytes: int, count: int) -> bool:
        """Return whether doubling (log2(p) · n bytes in log2(p) rounds) beats halving (2 (1 - 1/p) · n bytes in twice
        as many rounds)."""
        num_rounds = count.bit_length() - 1
        extra = (num_rounds - 2 * (1 - 1 / count)) * num_bytes
        return num_bytes <= DOUBLING_BYTES and extra <= num_rounds * ROUND_BYTES

    def _received_in(self, flat: Tensor, length: int, lane: int) -> Tensor:
        """Return the lane's receive buffer, grown as needed."""
        buffer = self._received.get((flat.dtype, lane))
        if buffer is None or buffer.numel() < length or buffer.device != flat.device:
            buffer = torch.empty(length, dtype=flat.dtype, device=flat.device)
            self._received[flat.dtype, lane] = buffer
        return buffer[:length]

    # Both are generators that yield once their messages are posted and have to be waited for.

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
        if sent.device.type != "cpu":
            pairs = [[(partner, tensor)] if tensor.numel() else [] for tensor in (sent, received)]
            return _Exchange(name, self.post(*pairs), self.wait_for)
        with naming_lost_instance(name):
            messages = []
            # Messages between two instances arrive in the order in which they are sent, so one tag per lane is
            # enough. These are the group's own methods: dist.isend and dist.irecv do the same after many checks.
            if received.numel():
                messages.append(self.group().recv([received], partner, FIRST_TAG + lane))
            if sent.numel():
                messages.append(self.group().send([sent], partner, FIRST_TAG + lane))
        return _Exchange(name, messages, self.wait_for)


class _Exchange:
    """A pair of messages in flight, one each way."""

    def __init__(
        self, partner: int, messages: list[dist.Work], wait_for: Callable[[Sequence[dist.Work]], None]
    ) -> None:
        self._partner, self._messages, self._wait_for = partner, messages, wait_for

    def wait(self) -> None:
        with naming_lost_instance(self._partner):
            self._wait_for(self._messages)
