"""Notes that the launcher of a host and its instances leave for each other in a folder that nobody else can enter: who
belongs to the run, who has what, where to go on from. Written aside and renamed, so that each is read whole."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from podium.machine.bounded_files import FACTS_BYTES, parse_mapping, read_limited

_FOLDER = "crew"
#: longer than the launcher takes between two looks
QUIET_S = 5.0


class Board:
    """The notes of one attempt. A note has a name, and the newest one of a name counts."""

    def __init__(self, launch_folder: Path, attempt: int) -> None:
        self.launch_folder, self._folder = launch_folder, launch_folder / f"{_FOLDER}-{attempt}"
        self._seen: tuple[int, int] | None = None

    def open(self) -> None:
        """Make the folder; the launcher does so before it starts instances."""
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def is_there(self) -> bool:
        """Return whether the attempt is still under way."""
        return self._folder.is_dir()

    def put(self, name: str, facts: Mapping[str, Any]) -> None:
        aside = self._folder / f".{name}-{os.getpid()}"
        aside.write_text(json.dumps(facts), encoding="utf-8")
        aside.replace(self._folder / name)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a note; None where there is none, or it is no note."""
        with suppress(OSError, ValueError):
            return parse_mapping(read_limited(self._folder / name, FACTS_BYTES))
        return None

    def all(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the notes `kind-NUMBER`, by number."""
        found = {}
        with suppress(OSError):
            for path in self._folder.glob(f"{kind}-*"):
                number = path.name.removeprefix(f"{kind}-")
                if number.isdecimal() and (facts := self.get(path.name)) is not None:
                    found[int(number)] = facts
        return found

    def remove(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()

    def has_changed(self, name: str) -> bool:
        """Return whether this note was put since this was last asked. Takes two microseconds."""
        try:
            found = (self._folder / name).stat()
        except OSError:
            return False
        stamp = (found.st_mtime_ns, found.st_ino)
        changed, self._seen = stamp != self._seen, stamp
        return changed

    def is_quiet(self) -> bool:
        """Return whether no note was put for a while: clocks of file systems tick in hundredths of a second."""
        with suppress(OSError):
            return time.time() - self._folder.stat().st_mtime > QUIET_S
        return False
