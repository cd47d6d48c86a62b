"""The sockets of torch: its stores, used under torch's own launcher, listen on one address; all notice a cut link."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist


def give_up_after(timeout_s: float) -> None:
    """Break connections of this process to other hosts once they are silent for so long.

    torch's store waits for an answer until the system gives up, many minutes later; its sockets cannot be had from it,
    so they are found among this process's open files.
    """
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


def listening_store(address: str, port: int) -> dist.TCPStore:
    """Return a store that listens on `address` alone; torch by itself would listen on all addresses of the host.

    Raises OSError where the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=False, master_listen_fd=listener.detach()
    )
