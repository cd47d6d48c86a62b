"""What went wrong, reported once: instances leave a note, the launcher reads the notes and names the cause."""

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from podium.machine.bounded_files import FACTS_BYTES, parse_mapping, read_limited

#: An instance that ends because another one did: never the cause.
PEER_LOST = 70
#: The same, but it knows which one fell silent.
SILENT = 71
#: Ends that must not be followed by a restart: the user's mistake, failed training, interrupted and saved.
FINAL = (2, 3, 75)
_STOP_REQUEST = "stop-requested"


@dataclass(frozen=True)
class Failure:
    """Why an instance ended."""

    instance: int
    host: str
    exit_code: int
    message: str
    log: str = ""
    when: float = 0.0
    #: whether every instance says the same, so that none needs naming
    shared: bool = False

    @property
    def final(self) -> bool:
        return self.exit_code in FINAL

    def sentence(self) -> str:
        """Return the message with the instance and the log that it belongs to."""
        where = "" if self.shared or self.instance < 0 else f"instance {self.instance} on {self.host}: "
        log = f" (traceback in {self.log})" if self.log else ""
        return f"{where}{self.message}{log}"


def write_failure(folder: Path, failure: Failure) -> None:
    """Leave a note for the launcher; written aside and renamed, as the launcher may be reading."""
    aside = folder / f".failure-{failure.instance}"
    aside.write_text(json.dumps({**asdict(failure), "when": time.time()}), encoding="utf-8")
    aside.replace(folder / f"failure-{failure.instance}.json")


def read_failures(folder: Path) -> list[Failure]:
    """Return the notes left so far, the oldest first."""
    notes = []
    for path in folder.glob("failure-*.json"):
        with suppress(OSError, ValueError):
            notes.append(failure_from(parse_mapping(read_limited(path, FACTS_BYTES))))
    return sorted(notes, key=lambda note: note.when)


def failure_from(facts: Mapping[str, Any]) -> Failure:
    """Return the failure in a note; raise ValueError if it is none, and nothing to go by."""
    try:
        note = Failure(**facts)
        return replace(note, instance=int(note.instance), exit_code=int(note.exit_code), when=float(note.when))
    except TypeError as error:
        raise ValueError(str(error)) from None


def record_stop_request(folder: Path) -> None:
    """Note that somebody asked to stop, before the instances hear of it: the launcher also sends signals of its own."""
    (folder / _STOP_REQUEST).touch()


def stop_was_requested(folder: Path) -> bool:
    """Return whether a signal to an instance comes from a person or a scheduler, not from the launcher itself."""
    return (folder / _STOP_REQUEST).exists()


def clear_failure(folder: Path, instance: int) -> None:
    """Remove the note of an instance."""
    (folder / f"failure-{instance}.json").unlink(missing_ok=True)


def clear_failures(folder: Path) -> None:
    """Remove the notes of the last attempt."""
    for path in folder.glob("failure-*.json"):
        path.unlink(missing_ok=True)


def find_cause(notes: list[Failure], exit_codes: Mapping[int, int], host: str) -> Failure | None:
    """Return the failure to report: a final one, else an instance that fell silent, was killed, or failed first.

    `exit_codes` are those of this host's instances. That an instance lost another one is reported last of all.
    """
    for matters in (lambda note: note.final, lambda note: note.exit_code == SILENT):
        if found := next(filter(matters, notes), None):
            same = [note for note in notes if note.message == found.message]
            return replace(found, shared=True) if len(same) > 1 else found
    noted = {note.instance for note in notes}
    for instance, code in sorted(exit_codes.items()):
        if code < 0 and instance not in noted and code != -signal.SIGTERM:
            return Failure(instance, host, code, f"was killed by {signal.Signals(-code).name}")
        if code in FINAL and instance not in noted:  # it ended before it could leave a note, and has said why itself
            return Failure(instance, host, code, f"ended with exit code {code} before it joined; see its message above")
    own = [note for note in notes if note.exit_code != PEER_LOST]
    return next(iter(own or notes), None)
