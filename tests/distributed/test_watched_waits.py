"""Waits for messages end when an instance is known to be lost, though gloo says nothing."""

import threading
import time
from datetime import timedelta

import pytest

from podium.distributed.lost import InstanceLost
from podium.distributed.watched_waits import WatchedWaits


class Message:
    """A message that arrives when it is told to, in place of gloo's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived, self.error = threading.Event(), error

    def wait(self, timeout: timedelta) -> None:
        if not self.arrived.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error


def test_messages_are_waited_for_one_after_the_other():
    waits, messages = WatchedWaits(), [Message(), Message()]
    for message, after_s in zip(messages, (0.25, 0.1), strict=True):
        threading.Timer(after_s, message.arrived.set).start()
    began = time.monotonic()
    waits.wait(messages, 60, lambda: False)  # type: ignore[arg-type]
    assert 0.2 < time.monotonic() - began < 5
    assert waits.end(5)


@pytest.mark.parametrize(("error", "told"), [(RuntimeError("closed by peer"), "closed by peer"), (None, "timed out")])
def test_errors_and_timeouts_reach_whoever_waits(error, told):
    waits, message = WatchedWaits(), Message(error)
    if error is not None:
        message.arrived.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=told):
            waits.wait([message], 0.2, lambda: False)  # type: ignore[list-item]
    assert waits.end(5)


def test_a_message_that_never_comes_is_given_up_once_its_sender_is_lost():
    waits, forgotten, at = WatchedWaits(), Message(), time.monotonic() + 0.3
    with pytest.raises(InstanceLost, match="the group has changed"):
        waits.wait([forgotten], 60, lambda: time.monotonic() > at)  # type: ignore[list-item]
    assert time.monotonic() - at < 5
    assert not waits.end(0.1)  # a thread still waits, so that the group must stay
    forgotten.arrived.set()
    assert waits.end(5)


def test_threads_wait_for_their_own_messages():
    waits, slow, done = WatchedWaits(), Message(), threading.Event()
    other = threading.Thread(target=lambda: (waits.wait([slow], 60, done.is_set), None))  # type: ignore[list-item]
    other.start()
    quick = Message()
    quick.arrived.set()
    waits.wait([quick], 60, lambda: False)  # type: ignore[list-item]
    assert other.is_alive()
    slow.arrived.set()
    other.join(5)
    assert waits.end(5)
