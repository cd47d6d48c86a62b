"""The study folder: every path in it, its lock, its definition, its table. Nobody else builds these names.

STUDY/study.yaml    the definition           STUDY/runs/0003/          an ordinary run folder
STUDY/base.yaml     the recipe without what varies   STUDY/recipes/0003.yaml   the recipe of that run
STUDY/study.json    small facts              STUDY/log/0003.log        what its processes have printed
STUDY/runs.jsonl    the states of runs       STUDY/earlier/0003-10ep/  the run before it was grown
STUDY/table.csv     one row per run, without clock times
"""

import csv
import io
import json
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podium import __version__
from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import open_regular, read_mapping
from podium.machine.folder_lock import is_taken, only_here
from podium.recipe.loading import Recipe, read_yaml, to_yaml, validated
from podium.runs.folder import JOB, Run, replace_file, write_json
from podium.study.definition import StudySection
from podium.study.records import Records, RunRecord, read_run_records
from podium.ui.visible import visible
from podium.workloads.registry import identity

_TAIL_BYTES = 64 << 10


class StudyFacts(BaseModel):
    """`study.json`: what is neither the definition of a study nor a result."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: str = ""
    created: str = ""
    #: that started it
    command: list[str] = []
    #: of work on it, all commands counted
    seconds: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    #: name of the workload and a hash of its code, where that is the user's
    workload: str | None = None
    #: of each key that was varied, once the study is complete
    importances: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


@dataclass(frozen=True)
class StudyFolder:
    """A study and its folder."""

    path: Path

    @property
    def definition_file(self) -> Path:
        return self.path / "study.yaml"

    @property
    def base_file(self) -> Path:
        return self.path / "base.yaml"

    @property
    def facts_file(self) -> Path:
        return self.path / "study.json"

    @property
    def records_file(self) -> Path:
        return self.path / "runs.jsonl"

    @property
    def table_file(self) -> Path:
        return self.path / "table.csv"

    @property
    def earlier(self) -> Path:
        return self.path / "earlier"

    def run(self, number: int) -> Run:
        return Run(self.path / "runs" / f"{number:04d}")

    def recipe_file(self, number: int) -> Path:
        return self.path / "recipes" / f"{number:04d}.yaml"

    def log_file(self, number: int) -> Path:
        return self.path / "log" / f"{number:04d}.log"

    @property
    def exists(self) -> bool:
        return self.definition_file.is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep any other process from working on this study; it is unlocked when this process ends, however it does."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        taken = f"another process is working on {self.path}: wait for its end, or stop it"
        with only_here(self.path / ".lock", taken):
            yield

    def is_locked(self) -> bool:
        """Return whether a process is working on this study."""
        return is_taken(self.path / ".lock")

    def definition(self) -> StudySection:
        """Return the definition that the study was started with; the file of its recipe may be elsewhere by now."""
        return validated(StudySection, dict(read_yaml(self.definition_file)), {}, str(self.definition_file))

    def base(self) -> dict[str, Any]:
        """Return the resolved recipe without what varies, as it was saved."""
        return read_yaml(self.base_file)

    def facts(self) -> StudyFacts:
        """Return the small facts; where there is no file, those of a study that has not begun."""
        advice = "restore it from a copy, or move it away"
        found = read_mapping(self.facts_file, advice) or {}
        try:
            return StudyFacts.model_validate(found)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{self.facts_file} is damaged: {visible(where)} cannot be used; {advice}") from None

    def write_facts(self, **facts: Any) -> None:
        """Add facts, or replace those of before."""
        write_json(self.facts_file, {**self.facts().model_dump(), **facts})

    def write_definition(self, study: StudySection, base: Recipe, command: list[str]) -> None:
        """Write what the study is; before anything is trained, and again when it has grown."""
        if not self.exists:
            for name in ("runs", "recipes", "log"):
                with writing(self.path / name):
                    (self.path / name).mkdir(parents=True, exist_ok=True)
            self.write_facts(version=__version__, created=now(), command=command, seconds=0.0)
        self.write_facts(workload=identity(base.workload.name))
        replace_file(self.base_file, to_yaml(base.tree()).encode())
        replace_file(self.definition_file, _in_order(study.tree()).encode())

    def has_results(self) -> bool:
        """Return whether anything was trained here. The folder of a run appears when its training can begin."""
        kept = any(record.state == "finished" for record in read_run_records(self.records_file).values())
        return kept or any(path.is_dir() and any(path.iterdir()) for path in (self.path / "runs", self.earlier))

    def clear(self) -> None:
        """Remove what a study that has trained nothing has written about itself."""
        with writing(self.path):
            for name in ("recipes", "log"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for file in (self.records_file, self.table_file, self.base_file, self.facts_file, self.definition_file):
                file.unlink(missing_ok=True)

    def records(self) -> dict[int, RunRecord]:
        """Return the states of the runs, for people: what is said to run, but by nobody, was stopped."""
        records = read_run_records(self.records_file)
        if self.is_locked():
            return records
        return {
            number: record.but(state="stopped", reason="killed") if record.state == "running" else record
            for number, record in records.items()
        }

    def write_table(self, study: StudySection, records: Records) -> None:
        """Write `table.csv`: what came out, the same to the bit however many runs went at once."""
        replace_file(self.table_file, table_text(study, records).encode())


def _in_order(tree: Mapping[str, Any]) -> str:
    """Return a definition as YAML with keys in their order, which is that of a grid and of the table's columns."""
    text = ""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            text += f"{key}:\n" + "".join(textwrap.indent(to_yaml({name: one}), "  ") for name, one in value.items())
        else:
            text += to_yaml({key: value})
    return text


def table_text(study: StudySection, records: Records) -> str:
    """Return the table of a study as CSV. Clock times are left out: they are in `runs.jsonl`."""
    keys = [key for key in study.values if key != "seed"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "number",
            "state",
            *map(visible, keys),
            "seed",
            "metric",
            "value",
            "best",
            "last",
            *(visible(f"over {one.metric}") for one in study.constraints),
            "updates",
            "weights_sha256",
            "reason",
        ]
    )
    for record in records.values():
        violations = [_cell(record.constraints.get(one.metric)) for one in study.constraints]
        writer.writerow(
            [
                record.number,
                record.state,
                *(_cell(record.values.get(key)) for key in keys),
                record.seed,
                visible(record.metric),
                _cell(record.value),
                _cell(record.best),
                _cell(record.last),
                *violations,
                _cell(record.updates),
                record.weights_sha256 or "",
                visible(record.reason),
            ]
        )
    return text.getvalue()


def _cell(value: Any) -> str:
    return "" if value is None else shown_value(value)


def shown_value(value: Any) -> str:
    """Return a value of a recipe as people write it; nothing in it can steer a terminal."""
    return visible(value if isinstance(value, str) else json.dumps(value, default=str))


def values_text(values: Mapping[str, Any]) -> str:
    """Return a choice of values on one line, by the last parts of the keys where these differ."""
    short = [key.rpartition(".")[2] for key in values]
    names = short if len(set(short)) == len(short) else list(values)
    return ", ".join(
        f"{visible(name)} {shown_value(value)}" for name, value in zip(names, values.values(), strict=True)
    )


def open_study(path: Path) -> StudyFolder:
    """Return an existing study."""
    study = StudyFolder(path)
    if not path.exists():
        raise UserError(f"the study folder {path} does not exist")
    if not study.exists:
        raise UserError(f"{path} is not a study folder (it has no study.yaml)")
    return study


def check_free(path: Path) -> None:
    """Raise UserError where something else than a study is in the way."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another folder with --out")
    if (
        (path / "study.yaml").exists()
        or not path.is_dir()
        or all(child.name == JOB or child.name.startswith(".lock") for child in path.iterdir())
    ):
        return
    # What a kill during its first second has left is no obstacle.
    if not (path / "study.json").exists() or (path / "runs.jsonl").exists():
        raise UserError(f"{path} is not empty and holds no study: choose another folder with --out")


def read_tail(path: Path, after: int = 0) -> str:
    """Return the end of a text file, from byte `after` on; empty where there is none."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(after, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


def now() -> str:
    """Return the time of day, as records have it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
