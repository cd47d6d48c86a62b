"""Hosts reached by ssh, rehearsed: the launcher's own way to start them, with a stand-in for ssh."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from podium.rehearse.processes import kill_family, kill_tasks
from podium.rehearse.stage import ADDRESSES, PODIUM, Event, SmallJob
from podium.rehearse.stand_in import STAGE

#: exit codes after which `podium resume` continues: interrupted, and a host that was lost
_GOES_ON = (75, 3)
_MOST_STARTS = 5


class SshStage:
    """A training over hosts, started here."""

    def __init__(self, job: SmallJob) -> None:
        self._job, self._folder, self.starts = job, job.folder / "stage", 0
        self._process: subprocess.Popen | None = None
        self._log = job.folder / "log"
        self.not_rehearsed = [
            "the hosts themselves: ssh, their Podium, data, clocks and cores (`podium submit ssh` checks those)",
            "that it goes on by itself: after an interruption, `podium resume` was given here as you would give it",
            *(["devices"] if job.site.node.devices else []),
        ]

    def begin(self) -> None:
        """Start the first host, which starts the others."""
        self._folder.mkdir()
        self._start(["train", str(self._job.recipe_file), "--out", str(self._job.run)])

    def play(self, event: Event) -> None:
        """Send SIGTERM, or SIGUSR1, to the first host; or kill all that runs on the last."""
        assert self._process is not None
        last = self._job.num_hosts - 1
        if event == "preempted":
            self._process.send_signal(signal.SIGTERM)
        elif event == "timed out":
            self._process.send_signal(signal.SIGUSR1)
        elif last:
            kill_tasks(self._folder, ADDRESSES[last])
        else:
            kill_family(self._process.pid)

    def step(self) -> bool:
        """Continue what was interrupted; return whether the training goes on."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return True
        killed = code < 0
        if (code not in _GOES_ON and not killed) or self.starts >= _MOST_STARTS:
            return False
        self._start(["resume", str(self._job.run)])
        return True

    def problem(self) -> str:
        """Return what the training ended with."""
        code = self._process.poll() if self._process else None
        if code == 0:
            return ""
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("podium: ")]
        return f"it ended with exit code {code}" + (f": {said[-1][8:]}" if said else "")

    def end(self) -> None:
        """Kill what still runs."""
        if self._process is not None and self._process.poll() is None:
            kill_family(self._process.pid)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _start(self, words: Sequence[str]) -> None:
        self.starts += 1
        command = [*PODIUM, *words, "--instances", str(self._job.num_hosts * self._job.per_host)]
        if self._job.num_hosts > 1:
            command += ["--hosts", ",".join(ADDRESSES[: self._job.num_hosts]), f"launch.ssh={_stand_in()}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, STAGE: str(self._folder)},
                cwd=self._job.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _stand_in() -> str:
    return shlex.join([sys.executable, "-m", "podium.rehearse.stand_in", "ssh"])
