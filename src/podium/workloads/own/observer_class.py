"""Classes of a user that watch a training: found and imported by their names in `log.observers`."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.workloads.own.code import is_own_name, load_file, load_module

KEY = "log.observers"


def observer_class(name: str) -> type:
    """Return the class that a name leads to, imported; raise UserError where there is none."""
    place, _, member = name.rpartition(":")
    if not is_own_name(name) or not member.isidentifier():
        raise UserError(f"{KEY}: {name} is neither of the form mine.py:MyLogger nor package.module:MyLogger")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UserError(f"{KEY}: there is no file {place}")
        found: Any = getattr(load_file(Path(place)).module, member, None)
    else:
        if not _exists(place):
            raise UserError(f"{KEY}: there is no module {place}: install its package, or give the path of the file")
        found = getattr(load_module(place).module, member, None)
    if not inspect.isclass(found):
        raise UserError(f"{KEY}: {place} has no class {member}")
    return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
