"""What gloo listens at closes behind its connections, and a connection of another user is noticed."""

import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from podium.distributed.closed_ports import Intruder, only_own_connections

#: connects to a port as another user, and stays connected until its input ends
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket() as stranger:
    stranger.connect(("127.0.0.1", int(sys.argv[1])))
    sys.stdin.read()
"""


def test_a_port_opened_within_answers_nobody_afterwards_and_connections_stay():
    with only_own_connections():
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname(), timeout=5)
        theirs, _ = listener.accept()
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname(), timeout=0.2)
    ours.sendall(b"still there")
    assert theirs.recv(64) == b"still there"
    for one in (listener, ours, theirs):
        one.close()


def test_a_port_opened_before_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with only_own_connections():
            pass
        socket.create_connection(listener.getsockname(), timeout=5).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_connection_of_another_user_is_an_intruder():
    stranger = None
    with (  # noqa: PT012
        socket.create_server(("127.0.0.1", 0)) as before,
        pytest.raises(Intruder, match="user 65534 of this host has connected to the port"),
        only_own_connections(),
    ):
        listener = before.dup()  # another descriptor of the same socket: not new, so it stays open
        command = [sys.executable, "-c", CONNECT, str(before.getsockname()[1])]
        stranger = subprocess.Popen(command, stdin=subprocess.PIPE)
        listener.settimeout(10)
        accepted, _ = listener.accept()
    assert stranger is not None
    with suppress(OSError):
        stranger.communicate(timeout=10)
    assert stranger.returncode == 0
    accepted.close()
    listener.close()
