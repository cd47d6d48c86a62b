"""The three ways a command ends badly, and the exit codes a scheduler reads. Caught once, in `cli.py`."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PodiumError(Exception):
    """Base of everything shown to the user as one sentence, without a traceback."""

    exit_code = 1


class UserError(PodiumError):
    """The user's mistake: the sentence says what is wrong and what to do."""

    exit_code = 2


class TrainingFailed(PodiumError):
    """Training cannot go on (a loss that is not finite, say); the last good checkpoint is kept."""

    exit_code = 3


class Interrupted(PodiumError):
    """Stopped by a signal or a time limit after saving; `podium resume` continues."""

    exit_code = 75


def system_reason(error: OSError) -> str:
    """Why the system refused, in the words of a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return error.strerror or str(error)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever keeps `path` from being written inside is the user's to solve: a full disk, a missing permission."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from error
