"""`summary.json`, `environment.json` and `metrics.jsonl` as read from a run folder, which anybody may have changed.

Everything that the commands use of them is checked here: a file that is damaged, or something else, gives one sentence.
What is not known here is handed on as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from podium.chain import LINK, LOSS_MARKS, WEIGHT_MARKS, WEIGHTS
from podium.errors import UserError, system_reason
from podium.machine.bounded_files import open_regular, parse_mapping, read_mapping

#: the longest line of `metrics.jsonl`, and the most lines that are held at a time
_LINE_BYTES = 1 << 20
_MAX_RECORDS = 1_000_000
#: the fields of a record that are no numbers, and what they hold
_DIGEST, _MARKS = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]*")
_DIGESTS = {WEIGHTS: _DIGEST, LINK: _DIGEST, LOSS_MARKS: _MARKS, WEIGHT_MARKS: _MARKS}

Record = dict[str, Any]


def _as_float(value: float) -> float:
    try:
        float(value)
    except OverflowError:
        raise ValueError("is too large for a number") from None
    return value


def _date(text: str) -> str:
    datetime.fromisoformat(text)  # raises ValueError
    return text


_Number = Annotated[float, AfterValidator(_as_float)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Date = Annotated[str, AfterValidator(_date)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _LastAndBest(_Facts):
    last: dict[str, _Number]
    best: dict[str, _Number]


class _Valid(_LastAndBest):
    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.best and "update" not in self.best:
            raise ValueError("the best is of no update")
        return self


class _Topology(_Facts):
    instances: _Count


class _Summary(_Facts):
    state: str = ""
    updates: _Count = 0
    total_updates: _Count = 0
    samples: _Count = 0
    epochs: _Number = 0
    samples_per_second: _Number = 0
    cpu_percent: _Number = 0
    num_parameters: _Count = 0
    train: _LastAndBest | None = None
    valid: _Valid | None = None
    average: dict[str, _Number] = {}
    seconds: dict[str, Annotated[float, Field(ge=0, lt=1e12)]] = {}
    energy: dict[str, Annotated[float, Field(ge=0, lt=1e15)]] = {}
    topology: _Topology | None = None
    weights_sha256: str | None = None
    recipe_sha256: str | None = None
    written: _Date | None = None


#: what a summary that is shown whole has
_SHOWN = (
    *("state", "updates", "total_updates", "samples", "epochs", "samples_per_second", "cpu_percent"),
    *("num_parameters", "valid", "seconds", "topology"),
)


class _Environment(_Facts):
    started: _Date | None = None
    command: Annotated[list[str], Field(min_length=1)] = ["podium"]
    threads_per_replica: Annotated[int, Field(ge=1, le=65536)] | None = None
    busy_threads: Annotated[int, Field(ge=1, le=65536)] | None = None
    kernels: list[str] | None = None


def read_summary(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """Return the summary of a run, empty where there is none yet. `whole`: raise unless it has what is shown of it."""
    advice = f"move it away, and `podium resume {path.parent}` writes it again"
    summary = _checked(path, _Summary, advice)
    missing = [name for name in _SHOWN if summary.get(name) is None]
    if not missing and "total" not in summary["seconds"]:
        missing = ["seconds.total"]
    if whole and summary and missing:
        raise UserError(f"{path} is damaged: {missing[0]} is missing; {advice}")
    return summary


def shorter_than_an_epoch(summary: Mapping[str, Any]) -> bool:
    """Return whether epochs say nothing about how far a training is, but updates do."""
    updates = summary.get("updates", 0)
    return bool(updates > 0 and summary.get("epochs", 0) * summary.get("total_updates", 0) < updates)


def read_environment(path: Path) -> dict[str, Any]:
    """Return the environment that a run was started in, empty where there is no record of it."""
    return _checked(path, _Environment, "restore it from a copy, or move it away: the run continues without it")


def _checked(path: Path, kind: type[_Facts], advice: str) -> dict[str, Any]:
    facts = read_mapping(path, advice)
    if facts is None:
        return {}
    try:
        kind.model_validate(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"][:3])[:80]
        raise UserError(f"{path} is damaged: {key} does not hold what it should; {advice}") from None
    return facts


def iterate_records(path: Path, *, digests: bool = False) -> Iterator[Record]:
    """Yield the metric records of a run one by one; a last line cut short by a kill is left out. `digests`: with those
    of the weights, which are text; all else is numbers."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(_LINE_BYTES + 1):
                number += 1
                whole = line.endswith(b"\n")
                if not whole and len(line) <= _LINE_BYTES:  # the end of the file
                    return
                record = parse_record(line, digests=digests) if whole else None
                if record is None:
                    raise UserError(
                        f"{path} is damaged: line {number} is no record of metrics; remove that line, or move the file "
                        "away and go on without the records in it"
                    )
                yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}; move it away, and go on without it") from None


def read_records(path: Path, *, digests: bool = False) -> list[Record]:
    """Return the metric records of a run. `digests`: with those of the weights."""
    records: list[Record] = []
    for record in iterate_records(path, digests=digests):
        records.append(record)
        if len(records) > _MAX_RECORDS:
            raise UserError(
                f"{path} has more than {_MAX_RECORDS:,} records: move it away for now, and have fewer of them with a "
                "larger engine.updates_per_call"
            )
    return records


def parse_record(line: bytes, *, digests: bool = False) -> Record | None:
    """Return the record in a line, None where it is none. `digests`: with those of the weights."""
    try:
        record = parse_mapping(line)
    except ValueError:
        return None
    update = record.get("update")
    if not isinstance(update, int) or isinstance(update, bool) or not 0 <= update < 2**63:
        return None
    found = {name: record.pop(name) for name in _DIGESTS if name in record}
    if not all(isinstance(value, str) and _DIGESTS[name].fullmatch(value) for name, value in found.items()):
        return None
    if not all(map(_is_number, record.values())):
        return None
    return {**record, **found} if digests else record


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000
    return isinstance(value, float)


def record_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of the file."""
    return (json.dumps(record) + "\n").encode()
