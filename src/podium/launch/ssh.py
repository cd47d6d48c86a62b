"""Hosts that are started from another one by ssh, seen from both ends. Called by `agent.py`."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from podium.errors import TrainingFailed, UserError
from podium.ui.console import say

#: How long a host's part of the run may take to end by itself before it is terminated.
_GRACE_S = 15.0


class RemoteHost:
    """Another host's part of the run, started from here. Its standard input closes when this process is gone."""

    def __init__(self, host: str, command: Sequence[str], secret: bytes) -> None:
        """Start it; `secret` is what it reads first, and nobody else can."""
        self.host, self.joined, self._last_line = host, False, ""
        try:
            # A session of its own keeps Ctrl-C away: the instances agree on when to stop, and it ends after that.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"{command[0]}, which would start {host}, cannot be run ({error.strerror}): set launch.ssh"
            ) from None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `check` tells
            self._process.stdin.write(secret + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._relay, name=f"podium-ssh-{host}", daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Raise UserError when it has ended before it joined."""
        code = self._process.poll()
        if self.joined or code is None:
            return
        self._reader.join(timeout=1)
        message = self._last_line.removeprefix("podium: ") or "no message came back"
        raise UserError(f"{self.host} could not be started by ssh (exit {code}): {message}")

    def end(self) -> None:
        """Give a host that has joined the time to end by itself; then close its standard input, then the connection."""
        assert self._process.stdin is not None
        for end, then_s in ((lambda: None, 5.0), (self._process.stdin.close, _GRACE_S), (self._process.terminate, 0.0)):
            with suppress(OSError, subprocess.TimeoutExpired):
                end()
                self._process.wait(then_s if self.joined else 0.1)
                return

    def _relay(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if text := line.decode(errors="replace").strip():
                self._last_line = text
                say(f"{self.host}: {text}")


def end_with_input(is_there: Callable[[], bool], process_ids: Callable[[], Sequence[int]], folder: Path) -> None:
    """End this host's part when the host that started it by ssh is gone, which closes standard input.

    `is_there`: whether that host can still be reached some other way.
    """
    threading.Thread(
        target=_end_with_input, args=(is_there, process_ids, folder), name="podium-input", daemon=True
    ).start()


def _end_with_input(is_there: Callable[[], bool], process_ids: Callable[[], Sequence[int]], folder: Path) -> None:
    while os.read(0, 4096):
        pass
    with Path(os.devnull).open("wb") as nothing:  # nobody reads it any more, and writing must not fail
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    while is_there():  # only the connection of ssh is lost, or that host is about to end
        time.sleep(1)
    if _send(process_ids(), signal.SIGTERM):
        time.sleep(_GRACE_S)  # to save, and for the main thread to end the usual way
        _send(process_ids(), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(TrainingFailed.exit_code)


def _send(process_ids: Sequence[int], number: signal.Signals) -> bool:
    """Send a signal; return whether there was a process to send it to."""
    for pid in process_ids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(process_ids)
