"""The code of a user's observers and a run: recorded and copied when the run begins, compared when it continues.

As with a workload (`own_code.py`), code runs only because a user named it. Unlike one, an observer cannot change the
weights: one that has changed does not stop a run from continuing, and the file is used as it is.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.errors import UserError, writing
from podium.runs import own_code
from podium.ui.console import warn
from podium.workloads.registry import code_files, is_own_file, observer_class, renamed_file

#: folder of a run with a numbered folder of copies for each observer; key of `environment.json`
COPIES = "code-observers"


def keep(run: Path, names: Sequence[str]) -> dict[str, Any]:
    """Import the observers of a new run and copy their files into it; return what `environment.json` holds of them.

    Raises UserError where one cannot be imported or hears no event.
    """
    from podium.machine.process_state import process_state_kept  # loads torch, which `podium show` does without

    found = []
    for number, name in enumerate(names, start=1):
        with process_state_kept():
            observer_class(name)
        files = code_files(name)
        for relative in files.sha256:
            target = run / COPIES / str(number) / relative
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(files.root / relative, target)
        own_code.remember(name, files.sha256.values())
        found.append({"name": name, "root": str(files.root), "files": dict(files.sha256)})
    return {COPIES: found} if found else {}


def names_to_use(run: Path, names: Sequence[str], environment: Mapping[str, Any]) -> list[str]:
    """Return the names under which the observers of a run are imported when it continues. Imports nothing.

    Raises UserError where the code is missing, or not known here and not trusted.
    """
    return [_name_to_use(run, name, number, environment) for number, name in enumerate(names, start=1)]


def _name_to_use(run: Path, name: str, number: int, environment: Mapping[str, Any]) -> str:
    if not is_own_file(name):
        own_code.check_named(run, name, f"the module of the observer {name}")
        return name
    main, which = Path(name.rpartition(":")[0]), own_code.CHOICE.which
    root, files = _recorded(run, name, environment)
    if which != "copy" and main.is_file():
        own_code.check_named(run, name, f"the observer {name}")
        changed = own_code.changed_files(root, files)
        if changed and which is None:
            warn(f"{changed[0]} has changed since {run} began: observing with the file as it is now")
        return name
    copies = run / COPIES / str(number)
    copy = copies / main.relative_to(root) if main.is_relative_to(root) else None
    if copy is None or not copy.is_file():
        raise UserError(f"{main} is gone, and {run} has no copy of it: continue without it, with log.observers=[]")
    own_code.check_copy(run, name, copies, copy)
    return renamed_file(name, copy.resolve())


def _recorded(run: Path, name: str, environment: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """Return root and files of an observer by the record of a run, which may come from elsewhere and say anything."""
    found = environment.get(COPIES)
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name:
            record = own_code.checked_record(run, entry)
            return Path(record["root"]), record["files"]
    return Path(name.rpartition(":")[0]).parent, {}
