"""`podium monitor` beside a real training: in a terminal that changes its size, and when that training is killed."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from podium.monitor.view import Watcher
from podium.runs.folder import Run
from tests.support.processes import DEADLINE_S, podium_command, podium_here, started
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow

_ENDLESS = ["train.length=1000000up", "checkpoint.every=0", "checkpoint.best=false", "valid.every=0"]


class Terminal:
    """A pseudo-terminal with a command in it."""

    def __init__(
        self, command: list[str], cwd: Path, columns: int, rows: int, interrupts: signal.Handlers = signal.SIG_DFL
    ) -> None:
        self._here, there = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(there)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}

        def before() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
            signal.signal(signal.SIGINT, interrupts)  # whatever is handed down to the tests themselves

        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True,
            preexec_fn=before,
        )  # fmt: skip
        self._there = there
        self.shown = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._here, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, what: str, since: int = 0) -> str:
        """Read until something is shown; return what has been since a place."""
        deadline = time.monotonic() + DEADLINE_S
        while what.encode() not in self.shown[since:]:
            assert time.monotonic() < deadline, f"{what} was not shown in {self.shown[since:][-3000:]!r}"
            if select.select([self._here], [], [], 0.1)[0]:
                self.shown += os.read(self._here, 65536)
        return self.shown[since:].decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._here, keys)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._there) == self.settings


@pytest.mark.parametrize(
    ("keys", "interrupts"),
    [(b"q", signal.SIG_DFL), (b"\x03", signal.SIG_DFL), (b"\x03", signal.SIG_IGN)],
    ids=["q", "Ctrl-C", "Ctrl-C, ignored by whoever starts it"],
)
def test_it_is_seen_in_a_terminal_of_any_size_and_left_without_harm(keys, interrupts, tmp_path):
    with started("train", *TINY["mnist"], *_ENDLESS, "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(tmp_path / "run", 4)
        terminal = Terminal(podium_command("monitor", "run"), tmp_path, 80, 24, interrupts)
        shown = terminal.until("q: end")
        assert "update" in shown
        assert "train loss" in shown
        place = len(terminal.shown)
        terminal.resize(50, 12)
        assert "train loss" in terminal.until("q: end", place)
        terminal.type(keys)
        assert terminal.process.wait(timeout=DEADLINE_S) == 0
        terminal.until("run: running after update")
        assert terminal.is_as_before()
        assert podium.process.poll() is None
        done = podium.ended(by=signal.SIGTERM)
        assert done.returncode == 75


def test_a_stopped_instance_is_silent_and_a_killed_run_is_killed(tmp_path):
    recipe = [*TINY["mnist"], *_ENDLESS, "batch.replicas=2"]
    run, now = Run(tmp_path / "run"), [0.0]
    with started("train", *recipe, "--instances", "2", "--out", "run", cwd=tmp_path) as podium:
        podium.until_records(run.path, 2)
        watcher = Watcher(run, clock=lambda: now[0])
        podium.until(lambda: len(watcher.look().rows) == 2, "both instances write")
        assert watcher.look().state == "running"
        podium.instances[1].suspend()

        def only_one_writes() -> bool:
            now[0] += 1.0
            time.sleep(0.25)
            rows = watcher.look().rows
            return rows[1].silent_s > 0 and rows[0].silent_s == 0

        podium.until(only_one_writes, "instance 1 is silent")
        view = watcher.look()
        assert "silent for" in view.waiting
        assert "instance 1 (on " in view.waiting
        podium.kill_all()
    now[0] += 100
    assert watcher.look().state == "killed"
    shown = podium_here("monitor", tmp_path / "run").stdout
    assert "killed" in shown
    assert "podium resume" in shown
