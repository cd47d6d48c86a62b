"""What is known of each run of a study: one line of `runs.jsonl` for every change of its state, the last one counts.

One process writes, the one that holds the study's lock; lines are only ever added, and are on the disk before anything
is done that relies on them. Readers need no lock: a line without its end is not there yet.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import append_regular, open_regular, parse_mapping

State = Literal["waiting", "running", "finished", "pruned", "failed", "stopped"]
#: states after which nothing more is done for a run
SETTLED = ("finished", "pruned", "failed")
_LINE_BYTES = 1 << 20
_MAX_LINES = 4_000_000
_MAX_FILE_BYTES = 4 << 30

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class RunRecord(BaseModel):
    """The state of one run. `point` numbers the choice of values, which several seeds may share."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    number: _Count
    point: _Count
    state: State
    values: dict[str, Any]
    seed: _Count
    #: of a process for it, one more for each crash
    attempts: _Count = 0
    #: why each of its processes that crashed did
    crashes: list[str] = []
    reason: str = ""
    metric: str = ""
    value: _Finite | None = None
    last: _Finite | None = None
    best: _Finite | None = None
    #: the value at each comparison of successive halving so far
    rungs: list[_Finite] = []
    #: by metric: how far it is on the wrong side of a constraint, 0 or less where it is not
    constraints: dict[str, _Finite] = {}
    #: the length that it was trained for, as its recipe has it
    length: str = ""
    updates: _Count | None = None
    weights_sha256: str | None = None
    #: while training, as its summary has it
    samples_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    started: str | None = None
    ended: str | None = None
    #: of all its processes
    seconds: Annotated[float, Field(ge=0, lt=1e12)] = 0.0

    @property
    def settled(self) -> bool:
        """Return whether nothing more is done for it."""
        return self.state in SETTLED

    @property
    def feasible(self) -> bool:
        """Return whether it keeps to the constraints."""
        return all(violation <= 0 for violation in self.constraints.values())

    def but(self, **changes: Any) -> "RunRecord":
        """Return the record with other facts."""
        return RunRecord.model_validate({**self.model_dump(), **changes})


Records = Mapping[int, RunRecord]


def read_run_records(path: Path) -> dict[int, RunRecord]:
    """Return the newest record of every run, in the order of their numbers; none where there is no file."""
    found: dict[int, RunRecord] = {}
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
                raise UserError(f"{path} has more than {_MAX_FILE_BYTES:,} bytes, which no study writes")
            for count in range(_MAX_LINES):
                line = file.readline(_LINE_BYTES + 1)
                if not line.endswith(b"\n"):
                    if len(line) > _LINE_BYTES:
                        raise _damaged(path, count + 1)
                    break
                record = _record(path, count + 1, line)
                found[record.number] = record
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None
    return dict(sorted(found.items()))


def _record(path: Path, number: int, line: bytes) -> RunRecord:
    try:
        return RunRecord.model_validate(parse_mapping(line))
    except (ValueError, ValidationError):
        raise _damaged(path, number) from None


def _damaged(path: Path, number: int) -> UserError:
    return UserError(f"{path} is damaged: line {number} is no record of a run; restore the file, or remove that line")


class RecordLog:
    """`runs.jsonl` as its one writer has it: the newest records in memory, every change on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = read_run_records(path)
        _drop_unfinished_line(path)

    def put(self, *records: RunRecord) -> None:
        """Add the new states of runs, and wait until they are on the disk."""
        if not records:
            return
        lines = b"".join((json.dumps(record.model_dump(), allow_nan=False) + "\n").encode() for record in records)
        with writing(self._path), append_regular(self._path) as file:
            while lines:  # a disk that fills up takes a part first and refuses the rest
                lines = lines[file.write(lines) :]
            os.fsync(file.fileno())
        for record in records:
            self.records[record.number] = record


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a kill or a full disk has left of a line, so that the next one begins where it should."""
    with writing(path):
        if not path.exists():
            return
        with open_regular(path) as file:
            size = end = os.fstat(file.fileno()).st_size
            while end > 0:
                start = max(0, end - _LINE_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
        if end < size:
            os.truncate(path, end)


def by_point(records: Iterable[RunRecord]) -> dict[int, list[RunRecord]]:
    """Return the runs of each choice of values, in the order of points and numbers."""
    points: dict[int, list[RunRecord]] = {}
    for record in sorted(records, key=lambda one: (one.point, one.number)):
        points.setdefault(record.point, []).append(record)
    return points


def mean(values: Iterable[float]) -> float:
    """Return the mean of values, the same whatever their order."""
    given = list(values)
    return math.fsum(given) / len(given)


def point_value(runs: Sequence[RunRecord]) -> float | None:
    """Return the mean over the seeds of one choice of values; None unless all of them have finished."""
    values = [run.value for run in runs if run.state == "finished" and run.value is not None]
    return mean(values) if values and len(values) == len(runs) else None
