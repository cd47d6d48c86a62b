"""A training inside of a Python session: its signals, its threads, and the errors of a training in other processes."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

import torch

from podium.errors import Interrupted, PodiumError, TrainingFailed, UserError
from podium.machine.signals import can_handle_signals, stop_signals_heard
from podium.training.stop_request import StopRequest
from podium.ui import console
from podium.workloads.registry import explain_own

_PR_SET_PDEATHSIG = 1


class SessionStop(StopRequest):
    """A request to stop that ends the training and never the session: a second Ctrl-C is an ordinary one.

    Only the main thread can handle signals; elsewhere there is nothing to ask with.
    """

    def __enter__(self) -> Self:
        return super().__enter__() if can_handle_signals() else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if can_handle_signals():
            super().__exit__(kind, error, traceback)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked_by_hand:
            raise KeyboardInterrupt
        super()._handle(number, frame)


@contextmanager
def session_kept() -> Iterator[None]:
    """Give the session back what a training sets for its process; raise what a user's code raised in their words."""
    threads = torch.get_num_threads()
    log = console.log_path()
    try:
        yield
    except Exception as error:
        shown = explain_own(error)
        if shown is None or isinstance(error, PodiumError):
            raise
        raise shown from error
    finally:
        torch.set_num_threads(threads)
        if log is not None:
            console.keep_log(log)


def is_interactive() -> bool:
    """Return whether a person works in this session: a notebook, IPython, or Python's own prompt."""
    return hasattr(sys, "ps1") or ("IPython" in sys.modules and _has_shell())


def _has_shell() -> bool:
    return sys.modules["IPython"].get_ipython() is not None


def run_podium(arguments: Sequence[str]) -> None:
    """Run a command of Podium in a process of its own, show what it says, and raise what it ends with.

    Signals reach it through this process, which waits until it has saved.
    """
    # Plain lines: what a notebook's kernel says about its terminal does not hold for a pipe.
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    env |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TTY_COMPATIBLE": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "podium", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
        preexec_fn=_end_with_parent(),
    )
    said: list[str] = []
    with process, _passing_signals_to(process):
        assert process.stderr is not None
        for line in process.stderr:
            line = line.rstrip("\n")
            if said or line.startswith("podium: "):
                said.append(line)
            else:
                print(line, file=sys.stderr, flush=True)
        code = process.wait()
    if code == 0:
        return
    kinds: dict[int, type[PodiumError]] = {2: UserError, 75: Interrupted}
    text = "\n".join(said).removeprefix("podium: ") or f"the training ended with exit code {code}"
    raise kinds.get(code, TrainingFailed)(text)


def _end_with_parent() -> "_EndWithParent | None":
    try:
        return _EndWithParent(ctypes.CDLL(None))
    except (OSError, AttributeError):
        return None


class _EndWithParent:
    """Called in the new process before it becomes Podium: it is asked to save when this one dies (Linux only)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._prctl = library.prctl

    def __call__(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _passing_signals_to(process: subprocess.Popen) -> Iterator[None]:
    if not can_handle_signals():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    with stop_signals_heard(pass_on):
        yield
