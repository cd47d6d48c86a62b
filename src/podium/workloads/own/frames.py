"""A user's exceptions as the user reads them: one sentence, and the frames of their own files beneath it."""

import traceback
from pathlib import Path

from podium.errors import PodiumError, TrainingFailed, UserError
from podium.ui.user_frames import describe, user_frames


def explain_import(error: BaseException, path: Path | None, module: str | None = None) -> BaseException:
    """Return the error to raise where a file could not be imported: a sentence with the line and what is wrong."""
    if isinstance(error, PodiumError) or not isinstance(error, Exception):
        return error
    where = str(path or module)
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename or where} line {error.lineno}: not valid Python: {error.msg}")
    advice = f"; install {error.name}, or correct the import" if isinstance(error, ModuleNotFoundError) else ""
    return UserError(f"{where} cannot be imported: {describe(error)}{advice}{user_frames(error)}")


def explain_own(error: BaseException) -> PodiumError | None:
    """Return the error to show instead of `error`, if a user's code is on the way to it; else None.

    What fails while a run trains has exit code 3, whatever is earlier is a mistake of the user.
    """
    if isinstance(error, PodiumError) or not isinstance(error, Exception) or not (frames := user_frames(error)):
        return None
    place = frames.splitlines()[-1].strip().partition(": ")[0]
    passed = [
        (frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    kind = TrainingFailed if ("podium.train", "_train") in passed else UserError
    return kind(f"{place}: {describe(error)}{frames}")
