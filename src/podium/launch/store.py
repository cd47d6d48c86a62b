"""A client of the service where instances meet, in the form that torch takes: its process groups meet through it."""

import base64
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from podium.errors import UserError
from podium.launch.channel import Channel
from podium.launch.meeting import Meeting
from podium.launch.service import short_path

_HANDSHAKE_S = 10.0
#: how often to try again where nobody listens yet
_AGAIN_S = 0.05
#: a service that has too many strangers at its door closes the oldest, which might be us
_NUM_REFUSALS = 3
#: time for an answer to travel, beyond the time that the service may take for it
_TRAVEL_S = 30.0
#: the system takes no time of months
_LONGEST_S = 1e6


class MeetingStore(dist.Store):
    """torch's interface to the service. Threads may share one, but wait for one another."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        """Connect; `timeout_s` is for that, for `get` and `wait`, and for how long the network may be silent.

        Raises UserError where the service has another secret or is not Podium's, dist.DistNetworkError where none
        answers.
        """
        super().__init__()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connect = partial(_connected, meeting, timeout_s)
        self._channel: Channel | None = self._connect()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        found = self._ask("get", [key])
        if found is None:
            self.wait([key])
            found = self._ask("get", [key]) or ""
        return base64.b64decode(found)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values; dist.DistStoreError where that takes too long."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        message = {"do": "wait", "keys": list(keys), "seconds": seconds}
        if keys and not self._exchange(message, seconds + _TRAVEL_S):
            raise dist.DistStoreError(f"nothing at {', '.join(keys)} after {seconds:g} s")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return base64.b64decode(self._ask("compare_set", [key], expected=_text(expected), value=_text(value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    def clone(self) -> "MeetingStore":
        return self

    def _ask(self, what: str, keys: list[str], **arguments: Any) -> Any:
        return self._exchange({"do": what, "keys": list(keys), "with": arguments}, self._timeout_s + _TRAVEL_S)

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> Any:
        with self._lock:
            try:
                self._channel = self._channel or self._connect()
                return self._channel.ask(message, min(timeout_s, _LONGEST_S))["answer"]
            except OSError as error:
                raise dist.DistNetworkError(f"the connection to where the instances meet is lost: {error}") from None
            except BaseException:  # a signal has interrupted it: what is asked next needs a new connection
                self._channel = None
                raise


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def nobody_listens(meeting: Meeting, timeout_s: float) -> bool:
    """Return whether the host of the service says that there is none any more; False where it does not answer."""
    try:
        with _connection(meeting, timeout_s) as connection:
            Channel.open(connection, meeting.secret)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError):
        pass
    return False


def is_open(meeting: Meeting, timeout_s: float) -> bool:
    """Return whether the service still answers."""
    try:
        with _connection(meeting, timeout_s) as connection:
            Channel.open(connection, meeting.secret)
    except (OSError, ValueError):
        return False
    return True


def _connected(meeting: Meeting, timeout_s: float) -> Channel:
    deadline, refusals = time.monotonic() + timeout_s, 0
    while True:
        try:
            connection = _connection(meeting, max(1.0, min(_HANDSHAKE_S, deadline - time.monotonic())))
            try:
                channel = Channel.open(connection, meeting.secret)
            except BaseException:
                connection.close()
                raise
            _give_up_after(connection, timeout_s)
            return channel
        except ValueError:
            raise UserError(
                f"{meeting}, where the instances meet, is in use by something else than this Podium: "
                "choose another port with launch.port"
            ) from None
        except PermissionError:
            refusals += 1
            if refusals == _NUM_REFUSALS:
                raise UserError(
                    f"{meeting}, where the instances meet, has another secret than this host: "
                    "give all hosts the same with --secret-file"
                ) from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise dist.DistNetworkError(f"{meeting} does not answer: {error.strerror or error}") from None
        time.sleep(_AGAIN_S)


def _connection(meeting: Meeting, timeout_s: float) -> socket.socket:
    if meeting.folder is None:
        return socket.create_connection((meeting.address, meeting.port), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with short_path(meeting.folder) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _give_up_after(connection: socket.socket, seconds: float) -> None:
    """Break the connection once the other host has been silent for so long, or this one has waited for its receipt."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    milliseconds = max(1000, int(min(seconds, _LONGEST_S) * 1000))
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_USER_TIMEOUT", milliseconds)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
