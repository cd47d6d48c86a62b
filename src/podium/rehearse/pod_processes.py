"""Pods as processes of this machine: the command and environment of a manifest, without container and network."""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

#: what every pod of an indexed Job has in its environment
INDEX = "JOB_COMPLETION_INDEX"


class PodProcess:
    """The only container of a pod, as a process group."""

    def __init__(self, container: Mapping[str, Any], index: int, secrets: Mapping[str, str], log: Path) -> None:
        """Start it. `secrets`: what the Secrets of the job hold, by the name of the variable."""
        given = {entry["name"]: entry.get("value") or secrets[entry["name"]] for entry in container["env"]}
        inherited = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER")}
        # Libraries and caches are those of this user, whom a pod would not know.
        own = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                [*container["command"], *container.get("args", [])],
                env={**inherited, **given, **own, INDEX: str(index)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Return how it ended, as a container's status has it: 128 and the number of a signal."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to the first process, as a kubelet does."""
        self._process.terminate()

    def kill(self) -> None:
        """End every process of the pod, also those that are in sessions of their own."""
        everyone: list[psutil.Process] = []
        with suppress(psutil.Error):
            everyone = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in everyone:
            with suppress(psutil.Error):
                one.kill()
        self._process.wait()
