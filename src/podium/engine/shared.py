"""Buffers that are summed over the instances: in memory that the instances of one host share, else by messages.

`Buckets` keeps its gradients in one of these. Where instances share a host they read each other's gradients where they
lie: 5 ms of processor time beside the training where loopback sockets took 17 (two instances, 12 MB of gradients).
Written here as neither torch nor gloo has such a transport for CPUs.

    segment of an instance: its semaphores, one for each lane and mate, then its buffers
    a sum, where four mates (instances of a host) have a buffer each of four slices:
        meet; mate i adds slice i of all mates, in the tree's order, and joins it with slice i of the other hosts
        meet; everyone copies the other slices from those who added them
        meet; buffers may be changed again

Segments have no name and go with the last process that has one open, however it ends.
"""

import ctypes
import errno
import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from podium.engine.instances import InstanceLost, Instances

#: up to this every mate adds the whole buffer: a meeting fewer
_WHOLE_BYTES = 1 << 17
#: pieces that are added at a time, so that what is in between stays in the cache
_PIECE_BYTES = 1 << 18
_SEMAPHORE_BYTES = 64  # a sem_t has 32 at most; each in a cache line of its own
_ALIGNMENT_BYTES = 4096
#: how often someone who waits looks whether the other is still there
_LOOK_S = 0.2

Size = tuple[int, torch.dtype]  # elements


class Buffers(Protocol):
    """Flat tensors of this instance, of the same sizes on all of them."""

    flats: list[Tensor]

    def sum(self, number: int, lane: int) -> None:
        """Sums buffer `number` over the instances, in place; lanes are as in `Instances.sum_exact`."""
        ...


def summed_buffers(instances: Instances, sizes: Sequence[Size], device: torch.device, num_lanes: int) -> Buffers:
    """Collective: all instances call it together, and all get the same kind. Buffers begin as zeros."""
    shared = SharedBuffers.open(instances, sizes, num_lanes) if device.type == "cpu" else None
    return shared or SentBuffers(instances, sizes, device)


class SentBuffers:
    """Memory of this process alone; sums travel as messages."""

    def __init__(self, instances: Instances, sizes: Sequence[Size], device: torch.device) -> None:
        self._instances = instances
        self.flats = [torch.zeros(length, dtype=dtype, device=device) for length, dtype in sizes]

    def sum(self, number: int, lane: int) -> None:
        self._instances.sum_exact(self.flats[number], lane)


class SharedBuffers:
    """Memory that all instances of a host see."""

    def __init__(self, instances: Instances, mates: "list[_Segment]", own: int) -> None:
        self._instances, self._mates, self._own = instances, mates, own
        self._others = [place for place in range(len(mates)) if place != own]
        self.flats = mates[own].flats

    @classmethod
    def open(cls, instances: Instances, sizes: Sequence[Size], num_lanes: int) -> "SharedBuffers | None":
        """None where a host has only one instance, or any instance cannot see another's memory."""
        if instances.num_mates == 1:
            return None
        own = instances.index % instances.num_mates
        first = instances.index - own
        segment = None
        with suppress(OSError, AttributeError):  # not Linux, an old one, or not allowed
            segment = _Segment.create(instances.num_mates, num_lanes, sizes)
        place = (segment.pid, segment.fd, segment.token) if segment else (0, 0, 0)
        places = instances.gather(torch.tensor(place, dtype=torch.int64)).tolist()
        mates: list[_Segment] = []
        if segment:
            try:
                for index in range(first, first + instances.num_mates):
                    pid, fd, token = places[index]
                    same = index == instances.index
                    mates.append(segment if same else _Segment.opened(pid, fd, token, segment.layout))
            except (OSError, ValueError):
                mates = []
        seen = instances.gather(torch.tensor(bool(mates)))  # also: nobody lets go before all have opened
        return cls(instances, mates, own) if bool(seen.all()) else None

    def sum(self, number: int, lane: int) -> None:
        buffers = [mate.flats[number] for mate in self._mates]
        flat = buffers[self._own]
        self._meet(lane)
        if flat.numel() * flat.element_size() <= _WHOLE_BYTES:
            total = flat.clone()
            self._add(total, buffers, slice(None), lane)
            self._meet(lane)
            flat.copy_(total)
            return
        slices = _slices(flat.numel(), len(buffers))
        mine = slices[self._own]
        self._add(flat[mine], buffers, mine, lane)
        self._meet(lane)
        for place in self._others:
            flat[slices[place]].copy_(buffers[place][slices[place]])
        self._meet(lane)

    def _add(self, total: Tensor, buffers: list[Tensor], part: slice, lane: int) -> None:
        """total, which is this mate's part, becomes the sum of all mates' and all hosts'."""
        parts = [buffer[part] for buffer in buffers]
        size = _PIECE_BYTES // total.element_size()
        for start in range(0, total.numel(), size):
            piece = total[start : start + size]
            distance = 1
            while distance < len(parts):  # from this leaf of the tree up to its root (a + b = b + a)
                beside = (self._own ^ distance) // distance * distance
                piece.add_(_tree_sum([other[start : start + size] for other in parts[beside : beside + distance]]))
                distance *= 2
        self._instances.sum_exact(total, lane, distance=len(parts))

    def _meet(self, lane: int) -> None:
        """Returns when all mates have come here in this lane; what they wrote before can be read."""
        for place in self._others:
            self._mates[place].post(lane, self._own)
        own = self._mates[self._own]
        for place in self._others:
            deadline = time.monotonic() + self._instances.timeout_s
            while not own.wait(lane, place, _LOOK_S):
                index = self._instances.members[self._instances.index - self._own + place]
                if self._mates[place].has_ended():
                    raise InstanceLost(index, "its process has ended")
                if time.monotonic() > deadline:
                    raise InstanceLost(index, f"no answer in {self._instances.timeout_s:g} s")


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """The sum of a power of two of parts over the tree; the part itself where there is one."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _slices(length: int, count: int) -> list[slice]:
    step = -(-length // count // 16) * 16
    edges = [min(length, place * step) for place in range(count)] + [length]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class _Segment:
    """The memory of one mate as this process sees it."""

    def __init__(self, fd: int, pid: int, token: int, layout: "_Layout") -> None:
        """Takes `fd`; `pid` is the owner's."""
        self.fd, self.pid, self.token, self.layout = fd, pid, token, layout
        weakref.finalize(self, os.close, fd)  # at once: what follows may fail
        self._process = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._process)
        self._memory = mmap.mmap(fd, layout.num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.flats = [
            torch.frombuffer(self._memory, dtype=dtype, count=length, offset=offset)
            for (length, dtype), offset in zip(layout.sizes, layout.offsets, strict=True)
        ]

    @classmethod
    def create(cls, num_mates: int, num_lanes: int, sizes: Sequence[Size]) -> "_Segment":
        if not hasattr(_C, "sem_clockwait"):
            raise OSError("this C library has no semaphores that wait by the monotonic clock")
        layout = _Layout(num_mates, num_lanes, sizes)
        token = int.from_bytes(os.urandom(7))
        fd = os.memfd_create("podium-gradients")
        try:
            os.truncate(fd, layout.num_bytes)
        except OSError:
            os.close(fd)
            raise
        segment = cls(fd, os.getpid(), token, layout)
        segment._memory[:8] = token.to_bytes(8)
        for lane in range(num_lanes):
            for mate in range(num_mates):
                _call("sem_init", segment._semaphore(lane, mate), 1, 0)
        for flat in segment.flats:
            flat.zero_()  # here, so that the memory is near the core that uses it most
        return segment

    @classmethod
    def opened(cls, pid: int, fd: int, token: int, layout: "_Layout") -> "_Segment":
        """That of another process; OSError or ValueError where it cannot be seen from here."""
        if pid == 0:
            raise ValueError("it has none")
        segment = cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), pid, token, layout)
        if segment._memory[:8] != token.to_bytes(8):
            raise ValueError("another process of that number")
        return segment

    def post(self, lane: int, mate: int) -> None:
        _call("sem_post", self._semaphore(lane, mate))

    def wait(self, lane: int, mate: int, seconds: float) -> bool:
        """False when `mate` did not post within so many seconds. Other threads run meanwhile."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        deadline = _Timespec(*divmod(until, 10**9))
        address = self._semaphore(lane, mate)
        return _call("sem_clockwait", address, time.CLOCK_MONOTONIC, ctypes.byref(deadline))

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def _semaphore(self, lane: int, mate: int) -> ctypes.c_void_p:
        place = 1 + lane * self.layout.num_mates + mate
        return ctypes.c_void_p(self._address + place * _SEMAPHORE_BYTES)


class _Layout:
    """Where things are in a segment; the token comes first."""

    def __init__(self, num_mates: int, num_lanes: int, sizes: Sequence[Size]) -> None:
        self.num_mates, self.sizes = num_mates, sizes
        end = (1 + num_lanes * num_mates) * _SEMAPHORE_BYTES
        self.offsets = []
        for length, dtype in sizes:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self.offsets.append(start)
            end = start + length * dtype.itemsize
        self.num_bytes = end


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_C = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> bool:
    """A function of the C library that returns 0; False where it ran out of time or was interrupted."""
    if getattr(_C, name)(*args) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ETIMEDOUT, errno.EINTR):
        return False
    raise OSError(number, f"{name}: {os.strerror(number)}")
