"""Processes of `podium` forked from one that has loaded it already: loading takes two seconds of a core each time.

They are real processes, with their own environment, folder, output, signals and exit code, and so are the instances
that they launch, which are their children. What they do not show is the start of Python itself; tests of that, and of
what is read before `podium` is loaded, start it as `processes.podium_command` says.

    python -m tests.support.warm FD     the process they are forked from; `Warm` starts it and talks to it over FD
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.recipes import TINY

_MESSAGE_BYTES = 2**20
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


class WarmProcess:
    """As `subprocess.Popen`, as far as tests use it."""

    def __init__(self, warm: "Warm", args: list[str], pid: int) -> None:
        self._warm, self.args, self.pid = warm, args, pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._warm.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wait()


class Warm:
    """The process that others are forked from; started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def start(
        self,
        args: tuple[object, ...],
        cwd: Path,
        stdout: int,
        stderr: int,
        env: dict[str, str] | None = None,
        host: str | None = None,
    ) -> WarmProcess:
        """`podium ARGS` in `cwd`; `stdout` and `stderr` are file descriptors, `host` is a network namespace."""
        words = ["podium", *map(str, args)]
        request = {"args": words, "cwd": str(cwd), "env": {**os.environ, **(env or {})}, "host": host}
        with Path(os.devnull).open() as nothing:
            pid = self.ask(request, (nothing.fileno(), stdout, stderr))
        return WarmProcess(self, words, pid)

    def ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> int:
        with self._lock:
            if self._process is None:
                self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                        cwd=Path(__file__).parents[2],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                    )
            _send(self._link, request, fds)
            return int(_receive(self._link)[0]["answer"])

    def close(self) -> None:
        if self._process is not None:
            self._link.close()
            self._process.wait()


def _send(link: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([json.dumps(message).encode()], rights)


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 3)
    return (json.loads(text) if text else {}), fds


#: one for all tests of a process; `conftest.py` closes it
WARM = Warm()


# --- in the process that others are forked from -----------------------------------------------------------------------


def _forked(link: socket.socket) -> dict[str, Any]:
    """Serves until the link is closed; returns in forked processes only, with what they are to do."""
    while True:
        request, fds = _receive(link)
        if not request:
            os._exit(0)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            _send(link, {"answer": os.waitstatus_to_exitcode(status)})
            continue
        pid = os.fork()
        if pid == 0:
            link.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
        for fd in fds:
            os.close(fd)
        if pid == 0:
            return request
        _send(link, {"answer": pid})


def _become(request: dict[str, Any]) -> None:
    """Makes this process what it would be if it had been started by itself."""
    if request.get("host"):
        with Path("/run/netns", request["host"]).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["args"]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # With the buffers and the checks for a terminal of a new process.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)


class _Instance(subprocess.Popen):
    """What the launcher takes for the process that it has started: one forked by the nursery."""

    def __init__(
        self, link: socket.socket, args: tuple[str, ...], env: dict[str, str], log: Path | None = None
    ) -> None:
        python, option, module, *words = args
        assert (python, option, module) == (sys.executable, "-m", "podium"), args
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        _send(link, {"args": [module, *words], "cwd": str(Path.cwd()), "env": env, "log": str(log or "")})
        self.pid = int(_receive(link)[0]["answer"])


def _with_nursery() -> dict[str, Any] | None:
    """Forks a process from which instances will be forked, as this one will have threads and sockets by then.

    Returns None, and in the instances what they are to do. They are adopted: a child of this process each.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.fork():
        theirs.close()
        from podium.launch import processes
        from podium.study import executor

        def start(args: tuple[str, ...], env: dict[str, str]) -> _Instance:
            return _Instance(ours, args, env)

        def start_run(args: list[str], env: dict[str, str], log: Path) -> _Instance:
            return _Instance(ours, tuple(args), env, log)

        processes.start_instance = start  # type: ignore[assignment]
        executor.start_run = start_run  # type: ignore[assignment]
        return None
    ours.close()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all
    while True:
        request, _ = _receive(theirs)
        if not request:
            os._exit(0)
        near, far = socket.socketpair()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            theirs.close()
            near.close()
            os.setsid()
            far.send(str(os.getpid()).encode())
            far.recv(1)  # until it is adopted: what it does on the death of its parent must be on that of the right one
            far.close()
            _prctl(_PR_SET_NAME, ctypes.c_char_p(f"instance-{request['env'].get('RANK', '0')}".encode()))
            if request["log"]:
                _write_to(request["log"])
            return request
        os.waitpid(between, 0)
        pid = int(near.recv(20))
        near.send(b".")
        near.close()
        far.close()
        _send(theirs, {"answer": pid})


def _write_to(log: str) -> None:
    """Sends both streams to a file, and ends with the process that has started this one, as a run of a study does."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _load_everything() -> None:
    """Every module of Podium, and the machine code of every workload's kernels; no threads stay behind."""
    import podium

    for module in pkgutil.walk_packages(podium.__path__, "podium."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    from podium.recipe.loading import load_recipe
    from podium.train import train

    for name, *overrides in TINY.values():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
            train(load_recipe(name, [*overrides, "train.length=1up", "schedule.warmup=0"]), Path(folder) / "run")
    # Only Python's own: torch and numpy had no need for others with one thread each.
    assert len([*Path("/proc/self/task").iterdir()]) == 1
    gc.freeze()


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    import podium.cli

    _load_everything()
    request = _forked(link)
    _become(request)
    if any(word.startswith(("--instances", "--hosts", "parallel.stages", "study")) for word in request["args"]):
        instance = _with_nursery()
        if instance is not None:
            _become(instance)
    try:
        podium.cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # All that a process does at its end but taking the interpreter down, which would copy most of its memory first.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
