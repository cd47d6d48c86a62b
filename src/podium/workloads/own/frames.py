"""A user's exceptions as the user reads them: one sentence, and the frames of their own files beneath it."""

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from podium.errors import PodiumError, TrainingFailed, UserError

_PODIUM = Path(__file__).parents[2]
_PYTHON = Path(sysconfig.get_path("stdlib"))
_MAX_FRAMES = 8


def explain_import(
    error: BaseException, path: Path | None, root: Path | None, module: str | None = None
) -> BaseException:
    """Return the error to raise where a file could not be imported: a sentence with the line and what is wrong."""
    if isinstance(error, PodiumError) or not isinstance(error, Exception):
        return error
    where = str(path or module)
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename or where} line {error.lineno}: not valid Python: {error.msg}")
    missing = isinstance(error, ModuleNotFoundError)
    advice = f": install {error.name}, or correct the import" if missing and isinstance(error, ImportError) else ""
    return UserError(f"{where} cannot be imported: {_named(error)}{advice}{_own_frames(error.__traceback__)}")


def explain_own(error: BaseException) -> PodiumError | None:
    """Return the error to show instead of `error`, if a user's code is on the way to it; else None.

    What fails while a run trains has exit code 3, whatever is earlier is a mistake of the user.
    """
    if isinstance(error, PodiumError) or not isinstance(error, Exception):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [frame for frame, _ in frames if _is_users(frame.f_code.co_filename)]
    if not own or not any(frame.f_globals.get("__name__", "").startswith("podium.") for frame, _ in frames):
        return None
    training = any(
        frame.f_globals.get("__name__") == "podium.train" and frame.f_code.co_name == "_train" for frame, _ in frames
    )
    last = traceback.extract_tb(error.__traceback__)
    place = next(entry for entry in reversed(last) if _is_users(entry.filename))
    text = f"{place.filename} line {place.lineno}, in {place.name}: {_named(error)}{_own_frames(error.__traceback__)}"
    return TrainingFailed(text) if training else UserError(text)


def _named(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _own_frames(at: TracebackType | None) -> str:
    entries = [entry for entry in traceback.extract_tb(at) if _is_users(entry.filename)]
    return "".join(
        f'\n  File "{entry.filename}", line {entry.lineno}, in {entry.name}\n    {entry.line}'
        for entry in entries[-_MAX_FRAMES:]
    )


def _is_users(filename: str) -> bool:
    """Return whether a frame is of a user's file: neither Podium's, nor an installed package's, nor Python's own."""
    if filename.startswith("<frozen"):
        return False
    path = Path(filename)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return not (installed or path.is_relative_to(_PODIUM) or path.is_relative_to(_PYTHON))
