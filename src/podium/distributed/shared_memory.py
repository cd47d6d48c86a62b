"""Memory that the instances of one host share, with barriers in it. Written here because neither torch nor gloo has
such a transport for CPUs.

    segment of a neighbour: whether it has left, its semaphores for each lane, then its buffers (flat tensors)

Semaphores of a lane: one that each neighbour posts, for barriers of two or of some; a gate, which the last one to reach
a barrier of all opens; and in the first segment how many may still come before the last, and how many have come. So
whoever waits sleeps once for each barrier, however many there are: eight processes on two cores that wait for one
another by pairs are woken seven times each.

Segments have no name, and the system frees them when the last process that has them open ends, however it ends.
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

from podium.distributed.lost import InstanceLost

_SEMAPHORE_BYTES = 64  # a sem_t takes 32 at most; each has its own cache line
_ALIGNMENT_BYTES = 4096
#: where a segment says that its process takes no further part, behind the token
_LEFT = 8
#: how often a waiting process checks that the others are still there
_CHECK_S = 0.1

Size = tuple[int, torch.dtype]  # elements


class SharedMemory:
    """Buffers of the same sizes for each neighbour, visible to all of them, and lanes with a barrier each."""

    def __init__(self, segments: "list[Segment]", own: int, members: Sequence[int], timeout_s: float) -> None:
        self._segments, self.own, self._members, self._timeout_s = segments, own, members, timeout_s
        self.others = [place for place in range(len(segments)) if place != own]
        #: the buffers of each neighbour
        self.flats = [segment.flats for segment in segments]

    @classmethod
    def open(
        cls,
        gather: Callable[[Tensor], Tensor],
        index: int,
        neighbours: range,
        members: Sequence[int],
        timeout_s: float,
        sizes: Sequence[Sequence[Size]],
        num_lanes: int = 1,
    ) -> "SharedMemory | None":
        """Open the segments of all neighbours, whose buffers have these `sizes`. Collective. Return None on all
        instances if any of them cannot open another's memory.

        `gather` is like `Instances.gather`; `index` is this instance's row in its result, `neighbours` are the rows of
        the instances of its host; `members` are the indices to name in errors. Buffers start as zeros.
        """
        own, segment = index - neighbours.start, None
        with suppress(OSError, AttributeError):  # not Linux, an old Linux, or not permitted
            segment = Segment.create(len(neighbours), num_lanes, sizes[own])
        place = (segment.pid, segment.fd, segment.token) if segment else (0, 0, 0)
        places = gather(torch.tensor(place, dtype=torch.int64)).tolist()
        segments: list[Segment] = []
        if segment:
            try:
                for neighbour, its_sizes in zip(neighbours, sizes, strict=True):
                    pid, fd, token = places[neighbour]
                    layout = Layout(len(neighbours), num_lanes, its_sizes)
                    segments.append(segment if neighbour == index else Segment.opened(pid, fd, token, layout))
            except (OSError, ValueError):
                segments = []
        try:
            opened = gather(torch.tensor(bool(segments)))  # also keeps any from closing before all have opened
        except BaseException:
            if segment:
                segment.leave()
            raise
        if not bool(opened.all()):
            return None
        return cls(segments, own, [members[neighbour] for neighbour in neighbours], timeout_s)

    def barrier(self, lane: int = 0, others: Sequence[int] | None = None) -> None:
        """Return when all instances of the host have called this for the lane; what they wrote before can be read.

        `others`: only these meet, each of which names the rest of them.
        """
        if others is None and len(self.others) > 1:
            self._pass_gate(lane)
            return
        others = self.others if others is None else others
        for place in others:
            self._segments[place].post(lane, self.own)
        for place in others:
            self._wait(lane, place, self._members[place])

    def _pass_gate(self, lane: int) -> None:
        """Wait for the last one to open the gates, or open them as the last one."""
        first, size = self._segments[0], len(self._segments)
        gate, come, left = size, size + 1, size + 2
        first.post(lane, come)  # publishes what this one wrote
        if first.take(lane, left):
            self._wait(lane, gate, None)
            return
        for _ in range(size):
            while not first.wait(lane, come, _CHECK_S):  # what the last ones wrote is about to be published
                pass
        for _ in self.others:
            first.post(lane, left)
        for place in self.others:
            self._segments[place].post(lane, gate)

    def _wait(self, lane: int, number: int, member: int | None) -> None:
        """Wait at one of this process's semaphores, which `member`, or any of them, is to post."""
        own, waited, began = self._segments[self.own], 0.0, time.monotonic()
        while not own.wait(lane, number, _CHECK_S):
            self._check_others()
            now = time.monotonic()
            waited, began = waited + min(now - began, 2 * _CHECK_S), now  # ignores time spent suspended
            if waited > self._timeout_s:
                raise InstanceLost(member, f"no answer in {self._timeout_s:g} s")

    def leave(self) -> None:
        """Take no further part: barriers, in other threads of this process too, and those of the others, end with
        InstanceLost."""
        self._segments[self.own].leave()

    def _check_others(self) -> None:
        if self._segments[self.own].has_left():
            raise InstanceLost(None, "this one has left the group")
        for place in self.others:
            if self._segments[place].has_ended():
                raise InstanceLost(self._members[place], "its process has ended")
            if self._segments[place].has_left():
                raise InstanceLost(self._members[place], "it has left the group")


class Segment:
    """The memory of one neighbour as this process sees it."""

    def __init__(self, fd: int, pid: int, token: int, layout: "Layout") -> None:
        """Map the segment behind `fd`, and take ownership of `fd`; `pid` is the process that created the segment."""
        self.fd, self.pid, self.token, self.layout = fd, pid, token, layout
        weakref.finalize(self, os.close, fd)  # first, as what follows may fail
        self._process = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._process)
        self._memory = mmap.mmap(fd, layout.num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.flats = [
            torch.frombuffer(self._memory, dtype=dtype, count=length, offset=offset)
            for (length, dtype), offset in zip(layout.sizes, layout.offsets, strict=True)
        ]

    @classmethod
    def create(cls, num_per_host: int, num_lanes: int, sizes: Sequence[Size]) -> "Segment":
        if not hasattr(_C, "sem_clockwait"):
            raise OSError("this C library has no semaphores that wait by the monotonic clock")
        layout = Layout(num_per_host, num_lanes, sizes)
        token = int.from_bytes(os.urandom(7))
        fd = os.memfd_create("podium-instances")
        try:
            os.truncate(fd, layout.num_bytes)
        except OSError:
            os.close(fd)
            raise
        segment = cls(fd, os.getpid(), token, layout)
        segment._memory[:8] = token.to_bytes(8)
        for lane in range(num_lanes):
            for number in range(layout.num_semaphores):
                # all but one may come to a barrier before the last
                value = num_per_host - 1 if number == layout.num_semaphores - 1 else 0
                _done(_INIT(segment._semaphore(lane, number), 1, value), "sem_init")
        for flat in segment.flats:
            flat.zero_()  # by this process, so that the memory is near the core that uses it most
        return segment

    @classmethod
    def opened(cls, pid: int, fd: int, token: int, layout: "Layout") -> "Segment":
        """Open the segment of another process; raise OSError or ValueError if that is not possible."""
        if pid == 0:
            raise ValueError("the process has no segment")
        segment = cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), pid, token, layout)
        if segment._memory[:8] != token.to_bytes(8):
            raise ValueError("another process has this number now")
        return segment

    def post(self, lane: int, number: int) -> None:
        _done(_POST(self._semaphore(lane, number)), "sem_post")

    def take(self, lane: int, number: int) -> bool:
        """Take one from a semaphore; return False if there is none."""
        return _done(_TAKE(self._semaphore(lane, number)), "sem_trywait")

    def wait(self, lane: int, number: int, seconds: float) -> bool:
        """Wait for a semaphore to be posted; return False if it is not within `seconds`. Releases Python's lock."""
        semaphore = self._semaphore(lane, number)
        if _done(_TAKE(semaphore), "sem_trywait"):
            return True
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        deadline = _Timespec(*divmod(until, 10**9))
        return _done(_C.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(deadline)), "sem_clockwait")

    def leave(self) -> None:
        self._memory[_LEFT] = 1

    def has_left(self) -> bool:
        return self._memory[_LEFT] == 1

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def _semaphore(self, lane: int, number: int) -> ctypes.c_void_p:
        place = 1 + lane * self.layout.num_semaphores + number
        return ctypes.c_void_p(self._address + place * _SEMAPHORE_BYTES)


class Layout:
    """Offsets in a segment: the token, then the semaphores, then the buffers."""

    def __init__(self, num_per_host: int, num_lanes: int, sizes: Sequence[Size]) -> None:
        self.sizes = sizes
        #: of a lane: one for each neighbour, then the gate, how many have come, how many may come before the last
        self.num_semaphores = num_per_host + 3
        end = (1 + num_lanes * self.num_semaphores) * _SEMAPHORE_BYTES
        self.offsets = []
        for length, dtype in sizes:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self.offsets.append(start)
            end = start + length * dtype.itemsize
        self.num_bytes = end


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_C = ctypes.CDLL(None, use_errno=True)
# What never blocks keeps Python's lock: to give it up and wait for it again takes longer than the call.
_KEEPING = ctypes.PyDLL(None, use_errno=True)
_INIT, _POST, _TAKE = _KEEPING.sem_init, _KEEPING.sem_post, _KEEPING.sem_trywait


def _done(result: int, name: str) -> bool:
    """Return whether a function of the C library succeeded; False if it has to wait, or was interrupted."""
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN):
        return False
    raise OSError(number, f"{name}: {os.strerror(number)}")
