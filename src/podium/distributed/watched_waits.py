"""Waits for messages that end as well when the instance at the other end is known to be lost.

When an instance is killed, gloo now and then forgets to tell whoever waits for a message of it: the connection is
closed, and the wait goes on until its timeout (seen after about one in thirty kills). Nothing can interrupt that wait,
so it is left to a thread, which is given up together with the group.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch.distributed as dist

from podium.distributed.lost import InstanceLost

#: how often whoever waits looks whether somebody is lost
_LOOK_S = 0.1


class WatchedWaits:
    """The waits of one group. Each thread that waits has another one that does so for it."""

    def __init__(self) -> None:
        self._waiters: dict[int, _Waiter] = {}

    def wait(self, works: Sequence[dist.Work], timeout_s: float, has_lost: Callable[[], bool]) -> None:
        """Return when all of these have come about; raise InstanceLost, or an error of gloo, where they
        will not. `has_lost`: whether an instance of the group is known to be lost."""
        waiter = self._waiters.get(threading.get_ident())
        if waiter is None:
            waiter = self._waiters[threading.get_ident()] = _Waiter(timedelta(seconds=timeout_s))
        waiter.begin(works)
        while not waiter.has_ended(_LOOK_S):
            if has_lost():
                raise InstanceLost(None, "the group has changed")

    def end(self, patience_s: float) -> bool:
        """End the threads; return whether all have done so after a while, as they do unless gloo has forgotten them."""
        deadline = time.monotonic() + patience_s
        for waiter in self._waiters.values():
            waiter.end()
        return all(waiter.is_over(deadline - time.monotonic()) for waiter in self._waiters.values())


class _Waiter:
    """A thread that waits for another one."""

    def __init__(self, timeout: timedelta) -> None:
        self._asked: SimpleQueue[Sequence[dist.Work] | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        # A daemon: the process need not wait for it to end.
        args = (self._asked, self._ended, timeout)
        self._thread = threading.Thread(target=_wait, args=args, name="messages", daemon=True)
        self._thread.start()

    def begin(self, works: Sequence[dist.Work]) -> None:
        self._asked.put(works)

    def has_ended(self, patience_s: float) -> bool:
        """Return whether the wait is over; raise what it ended with."""
        try:
            error = self._ended.get(timeout=patience_s)
        except Empty:
            return False
        if error is not None:
            raise error
        return True

    def end(self) -> None:
        self._asked.put(None)

    def is_over(self, patience_s: float) -> bool:
        self._thread.join(max(0.0, patience_s))
        return not self._thread.is_alive()


def _wait(
    asked: "SimpleQueue[Sequence[dist.Work] | None]", ended: "SimpleQueue[BaseException | None]", timeout: timedelta
) -> None:
    while (works := asked.get()) is not None:
        try:
            for work in works:
                work.wait(timeout)
            ended.put(None)
        except BaseException as error:
            ended.put(error)
        del works  # nothing of the group is kept until the next message
