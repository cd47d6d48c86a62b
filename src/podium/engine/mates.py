"""Mates: instances of one host, and the memory they share. Written here as neither torch nor gloo has such a transport
for CPUs.

    segment of a mate: its semaphores, one for each lane and mate, then its buffers (flat tensors)

Segments have no name and go with the last process that has one open, however it ends.
"""

import ctypes
import errno
import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from podium.engine.lost import InstanceLost

_SEMAPHORE_BYTES = 64  # a sem_t has 32 at most; each in a cache line of its own
_ALIGNMENT_BYTES = 4096
#: how often someone who waits looks whether the other is still there
_LOOK_S = 0.2

Size = tuple[int, torch.dtype]  # elements


class Mates:
    """Buffers of the same sizes for each mate, which all of them see, and lanes in which they meet."""

    def __init__(self, segments: "list[_Segment]", own: int, members: Sequence[int], timeout_s: float) -> None:
        self._segments, self.own, self._members, self._timeout_s = segments, own, members, timeout_s
        self.others = [place for place in range(len(segments)) if place != own]
        #: by mate, its buffers
        self.flats = [segment.flats for segment in segments]

    @classmethod
    def open(
        cls,
        gather: Callable[[Tensor], Tensor],
        index: int,
        num_mates: int,
        members: Sequence[int],
        timeout_s: float,
        sizes: Sequence[Size],
        num_lanes: int = 1,
    ) -> "Mates | None":
        """Collective; None on all instances where a host has only one, or any cannot see another's memory.

        `gather` is like `Instances.gather`, `index` the place in what it returns, where mates are neighbours; `members`
        are the names of all in errors. Buffers begin as zeros.
        """
        if num_mates == 1:
            return None
        own = index % num_mates
        mates = range(index - own, index - own + num_mates)
        segment = None
        with suppress(OSError, AttributeError):  # not Linux, an old one, or not allowed
            segment = _Segment.create(num_mates, num_lanes, sizes)
        place = (segment.pid, segment.fd, segment.token) if segment else (0, 0, 0)
        places = gather(torch.tensor(place, dtype=torch.int64)).tolist()
        segments: list[_Segment] = []
        if segment:
            try:
                for mate in mates:
                    pid, fd, token = places[mate]
                    segments.append(segment if mate == index else _Segment.opened(pid, fd, token, segment.layout))
            except (OSError, ValueError):
                segments = []
        seen = gather(torch.tensor(bool(segments)))  # also: nobody lets go before all have opened
        return cls(segments, own, [members[mate] for mate in mates], timeout_s) if bool(seen.all()) else None

    def meet(self, lane: int = 0) -> None:
        """Returns when all mates have come here in this lane; what they wrote before can be read."""
        for place in self.others:
            self._segments[place].post(lane, self.own)
        own = self._segments[self.own]
        for place in self.others:
            waited, began = 0.0, time.monotonic()
            while not own.wait(lane, place, _LOOK_S):
                if self._segments[place].has_ended():
                    raise InstanceLost(self._members[place], "its process has ended")
                now = time.monotonic()
                waited, began = waited + min(now - began, 2 * _LOOK_S), now  # not the time that all were suspended
                if waited > self._timeout_s:
                    raise InstanceLost(self._members[place], f"no answer in {self._timeout_s:g} s")


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
        fd = os.memfd_create("podium-mates")
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
