"""A user's code and a run: recorded and copied when the run begins, compared and trusted when it is used again.

Code runs only because a user named it. A recipe names it on this machine; a run folder may come from elsewhere. So the
checksums of code that was named here are kept in the user's state folder, outside of all runs, and a run whose code is
not among them is used only after `--trust`.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from podium.errors import UserError, writing
from podium.machine.state_folder import state_folder
from podium.recipe.section import is_own_name
from podium.ui.console import warn
from podium.workloads.registry import FITTED, code_files, file_sha256, is_own, is_own_file, renamed_file

#: folders of a run with the copies of a workload's code, and with what `podium.fit` was given
COPIES, OBJECTS = "code", "fit"
#: section whose name may lead to a user's code -> folder of the copies, and key of the record in `environment.json`
PLACES = {"workload": COPIES, "optim": "code-optim", "schedule": "code-schedule"}
#: more files than this are not one workload
_MAX_FILES = 10_000


@dataclass
class Choice:
    """What the user has said about the code of runs: set by the options of a command."""

    trust: bool = False
    #: copy: that of the run; now: the file as it is; None: whichever is unchanged
    which: Literal["copy", "now"] | None = None

    def flags(self) -> list[str]:
        """Return the options that say the same to other processes."""
        # Whoever starts them has trusted the code already.
        return ["--trust", *(["--code", self.which] if self.which else [])] if self.trust or self.which else []


CHOICE = Choice()


def names_in(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a recipe's tree that lead to a user's code, by section."""
    found = {}
    for part in PLACES:
        section = tree.get(part)
        name = section.get("name") if isinstance(section, dict) else None
        if isinstance(name, str) and (is_own(name) if part == "workload" else is_own_name(name)):
            found[part] = name
    return found


def record(names: Mapping[str, str]) -> dict[str, Any]:
    """Return what `environment.json` holds about a user's code; `names` as of `names_in`.

    Code of one folder has one record and one folder of copies: its files may import each other.
    """
    found: dict[str, Any] = {}
    for part, name in names.items():
        files = code_files(name)
        same = next((each for each in found.values() if each["root"] == str(files.root)), None)
        if same is None:
            found[PLACES[part]] = {"name": name, "root": str(files.root), "files": dict(files.sha256)}
        else:
            same["files"] |= files.sha256
    return found


def keep(run: Path, names: Mapping[str, str]) -> None:
    """Copy a user's code into a new run, and remember that it was named here."""
    for place, recorded in record(names).items():
        for relative in recorded["files"]:
            target = run / place / relative
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(recorded["root"]) / relative, target)
    for name in names.values():
        remember(name, code_files(name).sha256.values())


def remember(name: str, digests: Any) -> None:
    """Note in the user's state folder that code was named here; a folder that cannot be written is warned of."""
    _note(name, [*digests, _name_key(name)])


def check_named(run: Path, name: str, shown: str) -> None:
    """Raise UserError where a run names code that was never named here and is not trusted."""
    _check_trusted(run, name, [_name_key(name)], shown)


def check_copy(run: Path, name: str, copies: Path, copy: Path) -> None:
    """Raise UserError where a run's copies of code are more than that, or not known here and not trusted."""
    # Whatever lies beside it could be imported, too, whether the run's record says so or not.
    beside = [path for path in islice(copies.rglob("*"), _MAX_FILES + 1) if not path.is_dir()]
    if len(beside) > _MAX_FILES or any(path.suffix != ".py" for path in beside):
        raise UserError(f"{copies} holds more than copies of Python files: its code is not run")
    _check_trusted(run, name, [file_sha256(path) for path in beside], str(copy), copied=True)
    sys.dont_write_bytecode = True  # the folder stays as it is


def _note(name: str, keys: list[str]) -> None:
    folder = state_folder(COPIES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key in keys:
            note = folder / key
            if not note.exists():
                note.write_text(json.dumps({"name": name, "first": datetime.now().astimezone().isoformat()}))
    except OSError as error:
        warn(f"{folder} cannot be written ({error.strerror}): a later `podium resume` will ask for --trust")


def fitted_objects(run: Path, model: Any) -> Any:
    """Return the section `workload.model` of a run of `podium.fit`, with the objects in the run's own folder.

    Raises UserError where they were not written here and are not trusted, as building them calls what they name.
    """
    objects = run / OBJECTS
    if not isinstance(model, dict) or not (objects / "objects.json").is_file():
        return {**model, "objects": None} if isinstance(model, dict) else model
    _check_trusted(run, FITTED, [file_sha256(objects / "objects.json")], str(objects / "objects.json"), copied=True)
    return {**model, "objects": str(objects.resolve())}


def name_to_use(run: Path, part: str, name: str, environment: Mapping[str, Any]) -> str:
    """Return the name under which code of a run is imported: the user's own file, or the run's copy of it. `part`: the
    section of the recipe that names it.

    Raises UserError where the code is missing, or not known here and not trusted. Imports nothing.
    """
    if not is_own_file(name):
        _check_trusted(run, name, [_name_key(name)], f"the module of {name}")
        return name
    main = _file_of(name)
    recorded, copies = _recorded(run, environment, part, main)
    root = Path(str(recorded.get("root", "")))
    files: dict[str, str] = recorded.get("files", {})
    changed = changed_files(root, files)
    use_copy = CHOICE.which == "copy" or (CHOICE.which is None and bool(changed))
    if not use_copy:
        _check_trusted(run, name, [_name_key(name)], str(main))  # the user named this very file here
        return name
    if not main.is_relative_to(root) or not (copies / main.relative_to(root)).is_file():
        raise UserError(f"{main} has changed or is gone, and {run} has no copy of it: give the file back its content")
    copy = copies / main.relative_to(root)
    if CHOICE.which is None and main.exists():
        warn(f"{changed[0]} has changed since {run} began: using the run's own copy ({copy})")
    check_copy(run, name, copies, copy)
    return renamed_file(name, copy.resolve())


def check_unchanged(run: Path, names: Mapping[str, str], environment: Mapping[str, Any]) -> None:
    """Raise UserError where a run would continue with code that has changed, unless the user has said with which."""
    for part, name in names.items():
        if CHOICE.which is not None or not is_own_file(name):
            continue
        recorded, copies = _recorded(run, environment, part, _file_of(name))
        root = Path(str(recorded.get("root", "")))
        changed = [path for path in changed_files(root, recorded.get("files", {})) if path.exists()]
        if changed:
            raise UserError(
                f"{changed[0]} has changed since {run} began: add --code copy to continue with the run's own copy "
                f"({copies}), or --code now to continue with the file as it is, whose bits may differ"
            )


def changed_files(root: Path, files: Mapping[str, str]) -> list[Path]:
    """Return those of the recorded files that are gone or differ from what was recorded."""
    return [
        path
        for relative, digest in files.items()
        if not (path := root / relative).is_file() or file_sha256(path) != digest
    ]


def _recorded(run: Path, environment: Mapping[str, Any], part: str, main: Path) -> tuple[dict[str, Any], Path]:
    """Return the record of the code that a section of a run names, whose file is `main`, and the folder of copies."""
    places = {place: checked_record(run, environment[place]) for place in PLACES.values() if place in environment}
    place = PLACES[part]
    if place not in places:  # that of another section, which names code of the same folder
        with_it = (at for at, each in places.items() if main in (Path(each["root"]) / file for file in each["files"]))
        place = next(with_it, place)
    return places.get(place, {}), run / place


def checked_record(run: Path, found: Any) -> dict[str, Any]:
    """Return a record of code, which may come from elsewhere and say anything; raise UserError if it is none."""
    files = found.get("files") if isinstance(found, dict) else None
    if (
        not isinstance(files, dict)
        or len(files) > _MAX_FILES
        or not isinstance(found.get("root"), str)
        or not all(isinstance(digest, str) and _is_inside(relative) for relative, digest in files.items())
    ):
        raise UserError(f"{run / 'environment.json'} is damaged: its record of the code cannot be understood")
    return dict(found)


def _file_of(name: str) -> Path:
    return Path(name if name.endswith(".py") else name.rpartition(":")[0])


def _is_inside(relative: str) -> bool:
    path = Path(relative)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _check_trusted(run: Path, name: str, keys: list[str], shown: str, *, copied: bool = False) -> None:
    if all((state_folder(COPIES) / key).is_file() for key in keys):
        return
    if not CHOICE.trust:
        raise UserError(
            f"{run} would run code that was never run here ({shown}): look at it, then add --trust if it may run"
        )
    _note(name, keys if copied else [*keys, _name_key(name)])


def _name_key(name: str) -> str:
    return hashlib.sha256(f"name {name}".encode()).hexdigest()
