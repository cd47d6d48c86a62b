"""Ways to run `podium` beside the fixture of that name: left running beside the test, or quickly in this process."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from podium.cli import main
from tests.conftest import podium_command

DEADLINE_S = 120.0


def until(happened: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Returns as soon as `happened()` is true; fails when it does not become so."""
    end = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        time.sleep(0.01)


class Started:
    """A `podium` process and what it has said so far."""

    def __init__(self, process: subprocess.Popen, errors: Path) -> None:
        self.process = process
        self._errors = errors

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def until(self, happened: Callable[[], object], what: str) -> None:
        until(lambda: happened() or self.process.poll() is not None, what)
        assert self.process.poll() is None, f"it ended before: {what}\n{self.stderr}"

    def until_records(self, run: Path, count: int = 1) -> None:
        """Until `metrics.jsonl` has that many whole lines."""
        file = run / "metrics.jsonl"
        self.until(lambda: file.exists() and file.read_bytes().count(b"\n") >= count, f"{count} records in {file}")

    def ended(self, by: signal.Signals | None = None) -> subprocess.CompletedProcess:
        """How it ended, after sending it a signal."""
        if by is not None:
            self.process.send_signal(by)
        returncode = self.process.wait(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(self.process.args, returncode, "", self.stderr)


def _hear_hangups() -> None:
    """Tests may run under nohup, whose ignored SIGHUP is handed down."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def started(*args: object, cwd: Path, under: Sequence[str] = ()) -> Iterator[Started]:
    """`podium ARGS` as a process beside the test, `under` another command; killed when left."""
    errors = cwd / f"stderr-{time.monotonic_ns()}"
    with (
        errors.open("wb") as file,
        subprocess.Popen(
            [*under, *podium_command(*args)],
            cwd=cwd,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=_hear_hangups,
        ) as process,
    ):
        try:
            yield Started(process, errors)
        finally:
            process.kill()


def podium_here(*args: object) -> subprocess.CompletedProcess:
    """`podium ARGS` in this process and folder: all but the start of Python and torch, which takes seconds."""
    argv: Sequence[str] = ["podium", *map(str, args)]
    stdout, stderr = io.StringIO(), io.StringIO()
    returncode: object = None
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            returncode = end.code
    assert isinstance(returncode, int)
    return subprocess.CompletedProcess(argv, returncode, stdout.getvalue(), stderr.getvalue())
