"""The service at which instances and hosts meet: keys and values, kept by the first host or, on one host, by whoever
started the instances. A thread of its own; strangers cannot keep it from anything.
"""

import base64
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from podium.launch.channel import CLIENT_PROOF_BYTES, GREETING, NONCE_BYTES, BadMessage, Seals, new_nonce
from podium.ui.console import warn

#: how long a connection may take to show the secret, and how many may be about to do so; then the oldest has to go
PROOF_S = 10.0
MAX_UNPROVEN = 64
#: strangers are told by their addresses, once each; after so many, no more
_MAX_TOLD = 16
_BACKLOG = 1024
#: the system takes no time of months
_LONGEST_S = 3600.0


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone; OSError where the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_in(folder: Path) -> socket.socket:
    """Return a socket that listens in a folder which nobody but the user can enter: no port is opened."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(folder) as path:
        listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


class short_path:  # noqa: N801 (used like a function)
    """The path of the socket in a folder, for as long as entered; systems allow about 100 characters for it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._fd = folder, -1

    def __enter__(self) -> str:
        whole = str(self._folder / "meeting")
        if len(whole.encode()) < 100:
            return whole
        self._fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._fd}/meeting"

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _Client:
    """A connection, its keys once it has shown the secret, and what it waits for."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.nonce = new_nonce()
        self.seals: Seals | None = None
        self.received, self.unsent = bytearray(), bytearray()
        self.awaited: list[str] = []
        #: when it must have shown the secret; later: when waiting ends
        self.deadline = time.monotonic() + PROOF_S


class MeetingService:
    """Answers clients that know the secret: `set`, `get`, `wait`, `check`, `add`, `compare_set`, `delete`."""

    def __init__(self, listener: socket.socket, secret: bytes, tell: Callable[[str], None] = warn) -> None:
        """Take over `listener`. `tell`: where to report strangers."""
        self._listener, self._secret, self._tell = listener, secret, tell
        self._is_local = listener.family == socket.AF_UNIX
        self._values: dict[str, bytes] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._told: set[str] = set()
        self._answers: dict[str, Callable[..., object]] = {
            "set": self._set,
            "get": self._get,
            "check": self._check,
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "count": self._count,
        }
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken, self._closing = woken, False
        self._thread = threading.Thread(target=self._serve, name="podium-meeting", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._closing = True
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(5)

    def _serve(self) -> None:
        while not self._closing:
            deadlines = [client.deadline for client in self._clients.values() if client.deadline]
            timeout = min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_S) if deadlines else None
            for key, events in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    self._attend(key.fileobj, events)  # type: ignore[arg-type]
            self._end_waiting()
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:  # it has gone again, or there are too many open files: the next one may fare better
            return
        client = _Client(connection, "another user" if self._is_local else str(peer[0]))
        self._clients[connection] = client
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        if self._is_local and not _is_same_user(connection):
            self._refuse(client)
            return
        unproven = [one for one in self._clients.values() if one.seals is None]
        if len(unproven) > MAX_UNPROVEN:
            self._refuse(unproven[0])
        self._send(client, GREETING + client.nonce)

    def _attend(self, connection: socket.socket, events: int) -> None:
        client = self._clients.get(connection)
        if client is None:
            return
        if events & selectors.EVENT_WRITE:
            self._send(client, b"")
        if not events & selectors.EVENT_READ:
            return
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._refuse(client) if client.seals is None else self._drop(client)
            return
        client.received += part
        if client.seals is None and not self._prove(client):
            return
        assert client.seals is not None
        try:
            while connection in self._clients and not client.awaited:
                message = client.seals.take(client.received)
                if message is None:
                    break
                self._answer(client, message)
        except (BadMessage, KeyError, TypeError, ValueError):  # somebody in between, or another version of Podium
            self._refuse(client)

    def _prove(self, client: _Client) -> bool:
        """Let a client in that has shown the secret; return False as long as it has not."""
        if len(client.received) < CLIENT_PROOF_BYTES:
            return False
        nonce, proof = client.received[:NONCE_BYTES], client.received[NONCE_BYTES:CLIENT_PROOF_BYTES]
        del client.received[:CLIENT_PROOF_BYTES]
        seals = Seals(self._secret, client.nonce, bytes(nonce), is_service=True)
        if not seals.is_proof(bytes(proof)):
            self._refuse(client)
            return False
        client.seals, client.deadline = seals, 0.0
        _notice_silence(client.connection)
        self._send(client, seals.own_proof())
        return client.connection in self._clients

    def _refuse(self, client: _Client) -> None:
        self._drop(client)
        if client.address not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(client.address)
            with suppress(OSError):  # nobody may be there to read it
                self._tell(f"refused a connection from {client.address}, which does not know the secret of this run")

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()

    def _send(self, client: _Client, data: bytes) -> None:
        client.unsent += data
        try:
            while client.unsent:
                del client.unsent[: client.connection.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        more = selectors.EVENT_WRITE if client.unsent else 0
        self._selector.modify(client.connection, selectors.EVENT_READ | more)

    # --- what clients ask for ---

    def _answer(self, client: _Client, message: dict[str, Any]) -> None:
        what, keys = message["do"], message["keys"]
        if what == "wait":
            client.awaited = keys
            client.deadline = time.monotonic() + float(message["seconds"])
            self._end_waiting()
            return
        do = self._answers[what]
        self._reply(client, do(*keys, **message["with"]))
        if what in ("set", "add", "compare_set"):
            self._end_waiting()

    def _reply(self, client: _Client, answer: object) -> None:
        assert client.seals is not None
        self._send(client, client.seals.sealed({"answer": answer}))

    def _end_waiting(self) -> None:
        """Answer those that have what they waited for, or must wait no longer; end those that show no secret."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            if client.awaited:
                found = all(key in self._values for key in client.awaited)
                if found or now >= client.deadline:
                    client.awaited, client.deadline = [], 0.0
                    self._reply(client, found)
            elif client.seals is None and now >= client.deadline:
                self._refuse(client)

    def _set(self, key: str, value: str) -> None:
        self._values[key] = base64.b64decode(value)

    def _get(self, key: str) -> str | None:
        return base64.b64encode(self._values[key]).decode() if key in self._values else None

    def _check(self, *keys: str) -> bool:
        return all(key in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: str, value: str) -> str:
        if self._values.get(key, b"") == base64.b64decode(expected):
            self._values[key] = base64.b64decode(value)
        return base64.b64encode(self._values.get(key, b"")).decode()

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _count(self) -> int:
        return len(self._values)


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's or root's, where the system tells (Linux)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # nobody else can enter the folder
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (os.getuid(), 0)


def _notice_silence(connection: socket.socket) -> None:
    """Have the system look for a host that has gone without a word."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
