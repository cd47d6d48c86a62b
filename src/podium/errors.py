"""The three ways a command ends badly, and the exit codes a scheduler reads. Caught once, in `cli.py`."""


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
