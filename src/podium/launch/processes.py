"""The instances of this host as processes: started, looked at, ended. Called by `agent.py`."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

#: how long an instance may take to end when it is asked to
_GRACE_S = 30.0


def start_instance(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one instance, in a session of its own: Ctrl-C reaches it through its launcher, which hands it on."""
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


class LocalInstances:
    """The processes of one attempt, by the index of their instance."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        for index, env in environments.items():
            self._processes[index] = start_instance(command, env)

    def kill(self, index: int) -> None:
        """End one at once, and forget it."""
        if index in self._processes:
            self._processes[index].kill()
            self._processes[index].wait()
            self.forget(index)

    def forget(self, index: int) -> None:
        """Forget one that has ended."""
        self._processes.pop(index, None)

    def process_ids(self) -> list[int]:
        """Return those that are running, in the order of the instances."""
        return [process.pid for process in list(self._processes.values()) if process.poll() is None]

    def exit_codes(self) -> dict[int, int | None]:
        """Return how each has ended; None: it has not. Killed by a signal: the negative number of that."""
        return {index: process.poll() for index, process in self._processes.items()}

    def send(self, number: signal.Signals) -> None:
        for pid in self.process_ids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout_s: float) -> None:
        """Return when all have ended, or `timeout_s` have passed."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End all that are running, and forget them."""
        self.send(signal.SIGTERM)
        self.wait(_GRACE_S)
        self.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes = {}
