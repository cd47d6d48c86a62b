"""Closes the ports of gloo behind its connections: it neither encrypts nor asks who is there, and keeps listening.

`instances.py` connects every group within `only_own_connections`. Afterwards the ports answer nobody any more, and a
connection whose other end belongs to another user of this host ends the instance, as it may have taken the place of
another instance.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26  # of Linux, socket(7); the socket module does not name it
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction for the packet filter: keep 0 bytes, so drop
_TABLES = ("tcp", "tcp6")


class Intruder(RuntimeError):
    """A connection of this process leads to a process of another user."""


class Connections:
    """The sockets that were opened for a group."""

    def __init__(self) -> None:
        self.inodes: frozenset[str] = frozenset()

    def shut(self) -> None:
        """Break them off: whoever waits for a message, at either end, hears of it at once. Gloo has no call for this,
        and would have every instance wait for its timeout."""
        found = _own_sockets()
        for fd in [found[inode] for inode in self.inodes & found.keys()]:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                # One that listens stays: gloo ends the process where it cannot accept.
                if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    copy.shutdown(socket.SHUT_RDWR)


@contextmanager
def only_own_connections() -> Iterator[Connections]:
    """Connect within; then close the ports that were opened, and check who is at the other end of the connections,
    which are then known.

    Collective, as the caller must know that all have connected before the ports close: groups of gloo connect
    everyone to everyone before they are returned.
    """
    before, connections = set(_own_sockets()), Connections()
    yield connections
    opened = {inode: fd for inode, fd in _own_sockets().items() if inode not in before}
    connections.inodes = frozenset(opened)
    for fd in opened.values():
        _close_if_listening(fd)
    _check_users(set(opened), os.getuid())


def _own_sockets() -> dict[str, int]:
    """Return the sockets of this process as {inode: descriptor}."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(path.readlink())
            if target.startswith("socket:["):
                found[target.removeprefix("socket:[").removesuffix("]")] = int(path.name)
    return found


def _close_if_listening(fd: int) -> None:
    """Let a listening socket drop whatever arrives; closing it would end gloo's thread."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            code = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
            copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))


def _check_users(inodes: set[str], own_user: int) -> None:
    """Raise Intruder if one of these connections leads to a process of another user of this host.

    Other ends on other hosts are not in the tables; those of this host are, whatever address they use.
    """
    for table in _TABLES:
        with suppress(FileNotFoundError):  # a kernel without IPv6
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
            users = {(row[1], row[2]): int(row[7]) for row in rows}
            for row in rows:
                user = users.get((row[2], row[1]), own_user)
                if row[9] in inodes and user != own_user:
                    raise Intruder(
                        f"user {user} of this host has connected to the port {int(row[1].rpartition(':')[2], 16)} "
                        "in the place of another instance"
                    )
