"""Classes of a user that watch a training: found and imported by their names in `log.observers`."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.workloads.own.code import load_file, load_module

KEY = "log.observers"
#: methods of an observer, of which it has at least one
EVENTS = ("on_record", "on_validation", "on_checkpoint", "on_end")


def observer_class(name: str) -> type:
    """Return the class that a name leads to, imported; raise UserError where there is none or it hears no event."""
    place, _, member = name.rpartition(":")
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
    check_events(found, f"{KEY}: {member}")
    return found


def check_events(observer: Any, what: str) -> None:
    """Raise UserError unless a class or an object has a method of an observer; `what` names it."""
    if not any(callable(getattr(observer, event, None)) for event in EVENTS):
        raise UserError(f"{what} has none of the methods {', '.join(EVENTS)}")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
