"""Signed messages between the hosts of a run: both ends show that they know its secret before either reads a word.

    service -> client   greeting, service's nonce                     nothing secret in it
    client  -> service  client's nonce, proof                         HMAC of both nonces: a recorded one is of no use
    service -> client   proof
    then, each way      length, HMAC of (number of the message, body), body: a JSON object

Keys are made from the secret and both nonces, one for each direction, and messages are numbered: none can be repeated,
left out, sent back or taken over from another connection. Sizes before the proof are fixed, so nothing that a stranger
sends is ever parsed. Messages are signed, not encrypted. Written here, on Python's `hmac`: torch's store asks nobody
who they are, its rendezvous unpickles what it finds there, and TLS would need certificates on every host.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

GREETING = b"podium 1"
NONCE_BYTES = PROOF_BYTES = 32
#: what a client sends before it is believed
CLIENT_PROOF_BYTES = NONCE_BYTES + PROOF_BYTES
_HEADER = struct.Struct(f">I{PROOF_BYTES}s")
#: the largest body; values at a meeting are addresses and small facts
MAX_BODY_BYTES = 1 << 20


class BadMessage(Exception):
    """What came is not signed with the run's secret, or is too long."""


class Seals:
    """The keys of one connection, and how many messages went each way."""

    def __init__(self, secret: bytes, service_nonce: bytes, client_nonce: bytes, *, is_service: bool) -> None:
        keys = [
            _digest(hashlib.sha256(secret).digest(), role + service_nonce + client_nonce)
            for role in (b"client", b"service")
        ]
        self._receives, self._sends = keys if is_service else reversed(keys)
        self._num_received = self._num_sent = 0

    def own_proof(self) -> bytes:
        return _digest(self._sends, b"proof")

    def is_proof(self, shown: bytes) -> bool:
        return hmac.compare_digest(shown, _digest(self._receives, b"proof"))

    def sealed(self, message: dict[str, Any]) -> bytes:
        """Return the bytes of a message; each is good once, at its place."""
        body = json.dumps(message).encode()
        assert len(body) <= MAX_BODY_BYTES, "a message at a meeting is small"
        seal = _digest(self._sends, b"message" + struct.pack(">Q", self._num_sent) + body)
        self._num_sent += 1
        return _HEADER.pack(len(body), seal) + body

    def take(self, received: bytearray) -> dict[str, Any] | None:
        """Remove the next message from what was received and return it; None: it is not all there yet."""
        if len(received) < _HEADER.size:
            return None
        length, seal = _HEADER.unpack_from(received)
        if length > MAX_BODY_BYTES:
            raise BadMessage
        if len(received) < _HEADER.size + length:
            return None
        body = bytes(received[_HEADER.size : _HEADER.size + length])
        del received[: _HEADER.size + length]
        expected = _digest(self._receives, b"message" + struct.pack(">Q", self._num_received) + body)
        if not hmac.compare_digest(seal, expected):
            raise BadMessage
        self._num_received += 1
        message: dict[str, Any] = json.loads(body)
        return message


def _digest(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Channel:
    """A client's end of a connection whose service has shown that it knows the secret."""

    def __init__(self, connection: socket.socket, seals: Seals) -> None:
        self._connection, self._seals, self._received = connection, seals, bytearray()

    @classmethod
    def open(cls, connection: socket.socket, secret: bytes) -> "Channel":
        """Show the secret and have it shown.

        Raises ValueError where no Podium answers, PermissionError where it does not accept the secret, or does not
        know it, and OSError where the connection ends.
        """
        greeting = _read_exactly(connection, len(GREETING) + NONCE_BYTES)
        if not greeting.startswith(GREETING):
            raise ValueError("no service of Podium")
        nonce = new_nonce()
        seals = Seals(secret, greeting[len(GREETING) :], nonce, is_service=False)
        connection.sendall(nonce + seals.own_proof())
        try:
            proof = _read_exactly(connection, PROOF_BYTES)
        except ConnectionError:
            raise PermissionError("it did not accept the secret") from None
        if not seals.is_proof(proof):
            raise PermissionError("it does not know the secret")
        return cls(connection, seals)

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and return the answer; OSError where none comes."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(self._seals.sealed(message))
            while (answer := self._seals.take(self._received)) is None:
                part = self._connection.recv(1 << 16)
                if not part:
                    raise ConnectionResetError("the connection was closed")
                self._received += part
        except BadMessage:
            self.close()
            raise ConnectionAbortedError("somebody has changed the messages") from None
        except BaseException:  # signals too
            self.close()  # an answer that comes too late would be taken for that to another question
            raise
        return answer

    def close(self) -> None:
        self._connection.close()


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data
