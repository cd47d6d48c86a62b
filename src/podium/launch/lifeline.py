"""Instances end with their launcher, from their first line on. Loads nothing heavy, as it runs before all else."""

import ctypes
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

#: the process that has started this one as an instance
LAUNCHER = "PODIUM_LAUNCHER"
_PR_SET_PDEATHSIG = 1


def end_with_launcher(env: Mapping[str, str], number: signal.Signals = signal.SIGKILL) -> None:
    """Have the system send `number` to this process when its launcher ends; end at once where that has happened.

    Until there is something to save the signal is one that nothing delays, not even libraries being loaded.
    """
    if LAUNCHER not in env:
        return
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if launcher_is_gone(env):  # it ended before the system was asked
        os._exit(1)


def launcher_is_gone(env: Mapping[str, str]) -> bool:
    """Return whether the process that has started this instance has ended."""
    return LAUNCHER in env and os.getppid() != int(env[LAUNCHER])
