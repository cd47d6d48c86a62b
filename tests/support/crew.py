"""Real processes that stay for a whole test module and run functions as the instances of a run, over loopback."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from podium.distributed.instances import Instances

_TIMEOUT_S = 60


class Crew:
    """Up to `size` instances, forked from one process that has imported `module` (of the functions) already."""

    def __init__(self, size: int, module: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        # The server ignores the path it is given (in Python 3.11), and then what it cannot import.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            multiprocessing.forkserver.ensure_running()
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._num_joins = 0
        self._joined = 0
        self._links, self._processes = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(index, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def join(self, count: int, timeout_s: float = _TIMEOUT_S, num_per_host: int = 1) -> None:
        """The first `count` processes become the instances of a new run, `num_per_host` on each host."""
        self.join_hosts([num_per_host] * (count // num_per_host), timeout_s)

    def join_hosts(self, host_sizes: Sequence[int], timeout_s: float = _TIMEOUT_S) -> None:
        """The first processes become the instances of a new run, so many on each host."""
        self._num_joins += 1
        self._joined = sum(host_sizes)
        self._call([("join", (host_sizes, self._num_joins, timeout_s))] * self._joined)

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """function(instances, *args) on every instance of the run; what each returned, in their order."""
        return self._call([(function, args)] * self._joined)

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def close(self) -> None:
        for link in self._links:
            with suppress(BrokenPipeError):  # a test ended it
                link.send(None)
        for process in self._processes:
            process.join(_TIMEOUT_S)

    def _call(self, calls: Sequence[object]) -> list[Any]:
        links = self._links[: len(calls)]
        for link, call in zip(links, calls, strict=True):
            link.send(call)
        answers = []
        for index, link in enumerate(links):
            assert link.poll(2 * _TIMEOUT_S), f"instance {index} does not answer"
            answers.append(link.recv())
        errors = [f"instance {index}: {error}" for index, (error, _) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]


def _member(index: int, port: int, link: multiprocessing.connection.Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    instances = Instances.alone()
    while (call := link.recv()) is not None:
        what, args = call
        try:
            if what == "join":
                host_sizes, number, timeout_s = args
                instances.close()
                store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, is_master=False))
                instances = Instances.join(store, index, sum(host_sizes), timeout_s, host_sizes)
                value = None
            else:
                value = what(instances, *args)
            link.send(("", value))
        except BaseException:
            link.send((traceback.format_exc(), None))
    instances.close()
