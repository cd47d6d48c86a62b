"""What went wrong, told once: instances leave a note, the launcher reads the notes and names the cause."""

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

#: An instance that ends because another one did: never the cause.
PEER_LOST = 70
#: The same, but it knows which one fell silent.
SILENT = 71
#: Ends that must not be followed by a restart: the user's mistake, failed training, interrupted and saved.
FINAL = (2, 3, 75)
_REQUESTED = "stop-requested"


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
        where = "" if self.shared or self.instance < 0 else f"instance {self.instance} on {self.host}: "
        log = f" (traceback in {self.log})" if self.log else ""
        return f"{where}{self.message}{log}"


def write_failure(folder: Path, failure: Failure) -> None:
    """Leaves a note for the launcher; written aside and renamed, as the launcher may be reading."""
    aside = folder / f".failure-{failure.instance}"
    aside.write_text(json.dumps({**asdict(failure), "when": time.time()}), encoding="utf-8")
    aside.replace(folder / f"failure-{failure.instance}.json")


def read_failures(folder: Path) -> list[Failure]:
    notes = [Failure(**json.loads(path.read_bytes())) for path in folder.glob("failure-*.json")]
    return sorted(notes, key=lambda note: note.when)


def note_request(folder: Path) -> None:
    """Before a request to stop is handed to the instances: it is somebody's wish, not the agent clearing away."""
    (folder / _REQUESTED).touch()


def was_requested(folder: Path) -> bool:
    return (folder / _REQUESTED).exists()


def clear_failures(folder: Path) -> None:
    for path in folder.glob("failure-*.json"):
        path.unlink(missing_ok=True)


def cause(notes: list[Failure], exit_codes: Mapping[int, int], host: str) -> Failure | None:
    """The one to tell: a verdict, else one that fell silent, was killed, the first error, and last a lost peer."""
    for telling in (lambda note: note.final, lambda note: note.exit_code == SILENT):
        if found := next(filter(telling, notes), None):
            return found
    noted = {note.instance for note in notes}
    for instance, code in sorted(exit_codes.items()):
        if code < 0 and instance not in noted and code != -signal.SIGTERM:
            return Failure(instance, host, code, f"was killed by {signal.Signals(-code).name}")
    own = [note for note in notes if note.exit_code != PEER_LOST]
    return next(iter(own or notes), None)
