"""Connections that notice a cut link. torch's store waits for an answer as long as the system lets it, which by itself
gives up only after many minutes; its sockets are not handed out, so they are found among this process's open files."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path


def give_up_after(timeout_s: float) -> None:
    """From now on, a connection of this process to another host breaks when that host is silent for so long."""
    milliseconds = max(1000, int(timeout_s * 1000))
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError, ValueError):
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as own:  # the copy is closed, the option stays
                if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                own.getpeername()  # OSError where it is not connected
                own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
