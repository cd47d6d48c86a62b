"""By what commands find a training that is under way: a note in the launch's folder for those on the same machine, and
one in the run's folder for those on machines that share it. Neither holds a secret."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from podium.launch.board import Board
from podium.launch.meeting import Meeting
from podium.launch.plan import LaunchPlan
from podium.launch.private_folder import is_in_use, private_folder
from podium.machine.bounded_files import FACTS_BYTES, parse_mapping, read_limited

_HERE, _IN_RUN = "listing.json", "launch.json"


class Listing:
    """What a launcher tells of itself."""

    def __init__(self, run: Path | None, folder: Path, meeting: Meeting, plan: LaunchPlan) -> None:
        self._run, self._folder, self._meeting, self._plan = run, folder, meeting, plan
        self.attempt = 0
        #: whether others have been told where the run is
        self.is_told = False

    def __enter__(self) -> Self:
        if self._run is not None:
            facts = {"run": str(self._run.resolve()), "host": self._plan.host, "keeps": self._plan.keeps_store}
            _write(self._folder / _HERE, facts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._run is not None and self._plan.keeps_store:
            with suppress(OSError):
                (self._run / _IN_RUN).unlink()

    def tell(self) -> None:
        """Say in the folder of the run, which exists once it trains, where other hosts come to."""
        self.is_told = True
        if self._run is None:
            return
        facts = {
            "host": socket.gethostname(),
            "meeting": "" if self._meeting.folder is not None else str(self._meeting),
            "hosts": list(self._plan.topology.hosts),
            "overrides": list(self._plan.overrides),
        }
        with suppress(OSError):  # a full disk; the run goes on
            _write(self._run / _IN_RUN, facts)


def _write(path: Path, facts: Mapping[str, object]) -> None:
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.write_text(json.dumps(facts), encoding="utf-8")
    aside.replace(path)


@dataclass(frozen=True)
class Launcher:
    """A launcher on this machine."""

    folder: Path
    host: str
    #: whether it is that of the first host
    keeps: bool
    attempt: int

    @property
    def board(self) -> Board:
        return Board(self.folder, self.attempt)


def launchers_here(run: Path) -> list[Launcher]:
    """Return the launchers of a run on this machine."""
    found = []
    for path in private_folder().glob(f"launch-*/{_HERE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = parse_mapping(read_limited(path, FACTS_BYTES))
            if facts["run"] == str(run.resolve()) and is_in_use(path.parent):
                attempt = max((int(one.name.partition("-")[2]) for one in path.parent.glob("crew-*")), default=0)
                found.append(Launcher(path.parent, str(facts["host"]), bool(facts["keeps"]), attempt))
    return found


@dataclass(frozen=True)
class Whereabouts:
    """Where a run is under way, as its folder says."""

    host: str
    #: address and port; empty where the launch is open to its own host only
    meeting: str
    hosts: tuple[str, ...]
    overrides: tuple[str, ...]


def whereabouts(run: Path) -> Whereabouts | None:
    """Return where a run is under way; None where its folder says nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = parse_mapping(read_limited(run / _IN_RUN, FACTS_BYTES))
        texts = [tuple(str(one) for one in facts[name]) for name in ("hosts", "overrides")]
        return Whereabouts(str(facts["host"]), str(facts["meeting"]), *texts)
    return None
