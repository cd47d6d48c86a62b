"""Plans and how they came out: a plan is kept until its training ends, and is then compared with what was measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import append_regular, parse_mapping, read_limited, read_mapping
from podium.machine.state_folder import state_folder
from podium.plan.intervals import Interval
from podium.runs.folder import write_json

_MAX_BYTES = 16 << 20
_MAX_LINES = 2000


@dataclass(frozen=True)
class Grade:
    """One predicted value beside the measured one."""

    what: str
    predicted: Interval
    measured: float

    @property
    def error(self) -> float:
        """Return predicted against measured: 0.1 where 10 % too much was predicted."""
        return self.predicted.value / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.measured in self.predicted


@dataclass(frozen=True)
class Graded:
    """A training that had been planned."""

    when: str
    run: str
    grades: tuple[Grade, ...]


def keep_plan(recipe_sha256: str, num_instances: int, num_hosts: int, predicted: Mapping[str, Interval]) -> None:
    """Keep a plan for when its training ends, in place of an earlier one of the same training."""
    path = _plan_file(recipe_sha256, num_instances, num_hosts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {system_reason(error)}") from None
    write_json(path, {"predicted": {name: interval.listed() for name, interval in predicted.items()}})


def grade(summary: Mapping[str, Any], run: str) -> Graded | None:
    """Compare a complete training with its plan and record that; None where it was not planned.

    A run that was interrupted is not compared, nor one that its recipe ended early.
    """
    topology = summary.get("topology", {})
    path = _plan_file(str(summary.get("recipe_sha256")), topology.get("instances", 1), topology.get("hosts", 1))
    plan = read_mapping(path, "remove it, and plan again")
    if plan is None or summary.get("state") != "done" or summary.get("stopped_early"):
        return None
    seconds = summary.get("seconds", {})
    measured = {
        "samples_per_second": summary.get("samples_per_second"),
        "total_s": seconds.get("total", 0.0) - seconds.get("report", 0.0),
        "memory": summary.get("memory_peak_bytes"),
    }
    try:
        grades = tuple(
            Grade(what, Interval.read(listed), float(value))
            for what, listed in plan["predicted"].items()
            if (value := measured.get(what))
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is damaged: remove it, and plan again") from None
    graded = Graded(datetime.now().astimezone().isoformat(timespec="minutes"), run, grades)
    _append(graded)
    return graded


def history() -> list[Graded]:
    """Return the trainings that were compared with their plans, the oldest first."""
    path = _history_file()
    try:
        lines = read_limited(path, _MAX_BYTES).splitlines()[-_MAX_LINES:]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None
    found = []
    for line in lines:
        try:
            record = parse_mapping(line)
            grades = tuple(
                Grade(str(what), Interval.read(listed), float(measured))
                for what, (listed, measured) in record["grades"].items()
                if float(measured) > 0
            )
            found.append(Graded(str(record["when"]), str(record["run"]), grades))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # a line that was half written when the disk was full
    return found


def _append(graded: Graded) -> None:
    path = _history_file()
    record = {
        "when": graded.when,
        "run": graded.run,
        "grades": {one.what: [one.predicted.listed(), one.measured] for one in graded.grades},
    }
    try:
        with append_regular(path) as file:
            file.write(json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from None


def _plan_file(recipe_sha256: str, num_instances: int, num_hosts: int) -> Path:
    return state_folder("plans", f"{recipe_sha256[:32]}-{num_instances}-{num_hosts}.json")


def _history_file() -> Path:
    return state_folder("plans", "history.jsonl")
