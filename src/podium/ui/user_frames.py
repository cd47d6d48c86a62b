"""Tracebacks of code that the user wrote: what was raised, and the lines of the user's own files on the way to it."""

import sysconfig
import traceback
from pathlib import Path

_PODIUM = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({Path(path).resolve() for path in sysconfig.get_paths().values()})
_MAX_TEXT = 2000
_MAX_FRAMES = 8


def describe(error: BaseException) -> str:
    """Return the kind of an exception and what it says, on one line: `KeyError: 'label'`."""
    said = " ".join(str(error).split())[:_MAX_TEXT]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def user_frames(error: BaseException) -> str:
    """Return the frames in the user's own files, innermost last, each on an indented line; "" if there are none.

    Frames of Podium, of installed packages and of Python itself are left out: they show how the user's code was
    called, not what is wrong with it.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    lines = [
        f"\n  {_shown(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
        for frame in frames[-_MAX_FRAMES:]
    ]
    return "".join(lines)


def is_users(file: str) -> bool:
    """Return whether a file is the user's own: not of Podium, of an installed package, or of Python itself."""
    if file.startswith("<") and not file.startswith("<ipython"):  # <frozen importlib>, <string>
        return False
    path = Path(file).resolve()
    return not path.is_relative_to(_PODIUM) and not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _shown(file: str) -> str:
    """Return the name of a file, relative to the working folder where it lies below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else file
