"""The three ways in which a command fails, with the exit codes a scheduler reads. Caught once, in `cli`."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PodiumError(Exception):
    """Base class of errors shown to the user as one sentence, without a traceback."""

    exit_code = 1


class UserError(PodiumError):
    """A mistake of the user: the sentence says what is wrong and what to do."""

    exit_code = 2


class TrainingFailed(PodiumError):
    """Training cannot continue (for example, the loss is not finite); the last good checkpoint is kept."""

    exit_code = 3


class Interrupted(PodiumError):
    """The run was stopped by a signal or a time limit and has saved itself; `podium resume` continues it."""

    exit_code = 75


def system_reason(error: OSError) -> str:
    """Return why the system refused, phrased to fit into a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return error.strerror or str(error)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into a UserError: a full disk or a missing permission is for the user to solve."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from error
