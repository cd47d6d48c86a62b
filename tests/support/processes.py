"""Ways to run `podium`: to its end or left running beside the test, as a process of its own or quickly in this one."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import psutil

from podium.cli import main
from podium.runs.folder import Run
from tests.support.warm import WARM, WarmProcess

DEADLINE_S = 120.0


def podium_command(*args: object) -> list[str]:
    """`podium ARGS` for whoever starts Python itself."""
    return [sys.executable, "-c", "from podium.cli import main; main()", *map(str, args)]


def podium_ended(
    cwd: Path, *args: object, timeout: float = DEADLINE_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """`podium ARGS` as a process of its own, which has ended."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = WARM.start(args, cwd, stdout.fileno(), stderr.fileno(), {"COLUMNS": "200", **(env or {})})
        try:
            returncode = process.wait(timeout)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(process.args, returncode, stdout.read(), stderr.read())


def podium_afresh(
    cwd: Path, *args: object, timeout: float = DEADLINE_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """The same from the start of Python on, as a person's shell starts it."""
    env = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(podium_command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout, env=env)


def podium_here(*args: object) -> subprocess.CompletedProcess:
    """`podium ARGS` in this process and folder."""
    argv: Sequence[str] = ["podium", *map(str, args)]
    stdout, stderr = io.StringIO(), io.StringIO()
    returncode: object = None
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch("podium.cli.QuickEnd"),  # else this process, too, would end with the command's exit code
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            returncode = end.code
    assert isinstance(returncode, int)
    return subprocess.CompletedProcess(argv, returncode, stdout.getvalue(), stderr.getvalue())


def assert_user_error(done: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit 2, one sentence with these parts in it, no traceback."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    line = sentence(done.stderr)
    for part in parts:
        assert part in line, line


def sentence(errors: str) -> str:
    """The one that a command ends with."""
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("podium: ")]
    return line


def run_files(folder: Path) -> list[str]:
    """Everything below a folder, to see that nothing half-written stays."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


def num_records(run: Run) -> int:
    return run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0


# --- beside the test --------------------------------------------------------------------------------------------------


def until(happened: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Returns as soon as `happened()` is true; fails when it does not become so."""
    end = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        time.sleep(0.01)


class Started:
    """A `podium` process and what it has said so far."""

    def __init__(self, process: subprocess.Popen | WarmProcess, errors: Path) -> None:
        self.process = process
        self._errors = errors

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def instances(self) -> dict[int, psutil.Process]:
        """The processes that it has launched, by the index of their instance."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError):
                name = child.name().removeprefix("instance-")  # so called by `warm`
                found[int(name if name.isdecimal() else child.environ()["RANK"])] = child
        return found

    def until(self, happened: Callable[[], object], what: str) -> None:
        until(lambda: happened() or self.process.poll() is not None, what)
        assert self.process.poll() is None, f"it ended before: {what}\n{self.stderr}"

    def until_records(self, run: Path, count: int = 1) -> None:
        """Until `metrics.jsonl` has that many whole lines."""
        self.until(lambda: num_records(Run(run)) >= count, f"{count} records in {run}")

    def ended(self, by: signal.Signals | None = None) -> subprocess.CompletedProcess:
        """How it ended, after sending it a signal."""
        if by is not None:
            self.process.send_signal(by)
        returncode = self.process.wait(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(self.process.args, returncode, "", self.stderr)

    def kill_all(self) -> None:
        """Launcher and instances at once, as when a machine goes down."""
        tree = psutil.Process(self.process.pid)
        everyone = [tree, *tree.children(recursive=True)]
        for one in everyone:
            one.kill()
        psutil.wait_procs(everyone[1:])
        self.process.wait()


def _hear_hangups() -> None:
    """Tests may run under nohup, whose ignored SIGHUP is handed down."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def started(*args: object, cwd: Path, under: Sequence[str] | None = None) -> Iterator[Started]:
    """`podium ARGS` as a process beside the test; killed when left.

    `under`: words before the command (none: an empty list), for which Python is started anew.
    """
    errors = cwd / f"stderr-{time.monotonic_ns()}"
    with errors.open("wb") as file, Path(os.devnull).open("w") as nothing:
        process: subprocess.Popen | WarmProcess
        if under is None:
            process = WARM.start(args, cwd, nothing.fileno(), file.fileno())
        else:
            process = subprocess.Popen(
                [*under, *podium_command(*args)],
                cwd=cwd,
                stdout=nothing,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=_hear_hangups,
            )
        with process:
            try:
                yield Started(process, errors)
            finally:
                process.kill()
