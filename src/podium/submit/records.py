"""What was submitted from here: one small file for each job in the state folder. Never holds a secret."""

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_mapping
from podium.machine.state_folder import state_folder
from podium.recipe.messages import did_you_mean
from podium.runs.folder import write_json

TargetName = Literal["slurm", "kubernetes", "ssh"]
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,119}$"


class JobRecord(BaseModel):
    """A job that was submitted from here."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    #: what it is called here: the name of its folder
    name: Annotated[str, Field(pattern=_NAME)]
    target: TargetName
    kind: Literal["run", "study"]
    #: what the target calls it
    id: str
    #: the folder of the run or study, as the target sees it
    folder: str
    #: the site as it was, so that a changed file loses no job
    site: dict[str, Any]
    submitted: str
    #: what was submitted: the recipe or study, and the words after it
    words: list[str]
    #: what else the target needs to find it again
    facts: dict[str, str] = {}


def keep_job(record: JobRecord) -> None:
    """Keep the record of a job."""
    path = _file(record.name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {system_reason(error)}") from None
    write_json(path, record.model_dump())


def all_jobs() -> list[JobRecord]:
    """Return the jobs submitted from here, the oldest first."""
    records = [_read(path) for path in state_folder("jobs").glob("*.json")]
    return sorted((one for one in records if one is not None), key=lambda one: (one.submitted, one.name))


def find_job(text: str) -> JobRecord:
    """Return the job of this name, or with this number at its target."""
    jobs = all_jobs()
    found = [job for job in jobs if job.name == text] or [job for job in jobs if job.id == text]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{text} is the number of several jobs: {', '.join(job.name for job in found)}")
    hint = did_you_mean(text, [job.name for job in jobs])
    raise UserError(f"no job {text} was submitted from here{hint or ': `podium jobs` lists them'}")


def free_name(name: str, taken: set[str]) -> str:
    """Return `neuron-quick-001` and so on: the first name that no job and nothing in `taken` has."""
    path = name.removesuffix(".yaml").removesuffix(".yml").strip("./")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path).strip("-.")[:80] or "job"
    taken = taken | {file.stem for file in state_folder("jobs").glob("*.json")}
    number = next(number for number in range(1, 10**6) if f"{stem}-{number:03d}" not in taken)
    return f"{stem}-{number:03d}"


def check_name(name: str) -> str:
    """Return a name that a job can have; raise UserError for another."""
    if not re.match(_NAME, name):
        raise UserError(f"{name!r} cannot be the name of a job: expected letters, digits, dots, dashes, underscores")
    if _file(name).exists():
        raise UserError(f"a job called {name} was submitted from here: choose another folder with --out")
    return name


def now() -> str:
    """Return the time of day, as records have it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _file(name: str) -> Path:
    return state_folder("jobs", f"{name}.json")


def _read(path: Path) -> JobRecord | None:
    tree = read_mapping(path, "remove it: the job itself is not touched")
    try:
        return None if tree is None else JobRecord.model_validate(tree)
    except ValidationError:
        raise UserError(f"{path} is damaged: remove it; the job itself is not touched") from None
