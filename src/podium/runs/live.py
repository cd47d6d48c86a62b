"""`monitor/instance-N.json`: what each instance says of itself while it trains. `runs/monitoring.py` writes these
files, `podium monitor` reads them, from whichever host sees the run folder.

Plain files that are replaced whole: no connection is needed, and a reader never sees half of one.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podium.machine.bounded_files import parse_mapping, read_limited
from podium.runs.folder import Run

#: of one file, and of all of them
_FILE_BYTES, MAX_INSTANCES = 64 << 10, 4096
_NAME = re.compile(r"instance-(\d{1,5})\.json")

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]
_Word = Annotated[str, Field(max_length=64)]
_Sentence = Annotated[str, Field(max_length=400)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Window(_Facts):
    """The latest stretch of time: how many updates it had, and where its seconds went."""

    seconds: _Seconds
    updates: _Count
    phases: Annotated[dict[_Word, _Seconds], Field(max_length=32)]

    def share(self, *phases: str) -> float:
        """Return the part of the time that some phases took, 0 to 1."""
        spent = sum(max(0.0, self.phases.get(phase, 0.0)) for phase in phases)
        return min(1.0, spent / self.seconds) if self.seconds > 0 else 0.0


class InstanceState(_Facts):
    """What one instance has said last."""

    instance: _Count
    instances: Annotated[int, Field(ge=1, le=1 << 20)]
    host: Annotated[str, Field(max_length=255)]
    pid: _Count
    #: seconds between two writings
    every_s: Annotated[float, Field(gt=0, le=3600)]
    #: counts the writings
    number: _Count
    ended: bool
    phase: _Word
    update: _Count
    total_updates: _Count
    #: samples of an update on all instances, and on this one
    global_batch: _Count
    local_batch: _Count
    window: Window
    #: measured figures by name; a figure of `unknown` is in words why there is none
    values: Annotated[dict[_Word, float], Field(max_length=64)]
    unknown: Annotated[dict[_Word, _Sentence], Field(max_length=64)]

    @property
    def samples_per_second(self) -> float:
        """The rate of the whole run, as this instance sees it."""
        return self.window.updates * self.global_batch / self.window.seconds if self.window.seconds > 0 else 0.0

    @property
    def own_samples_per_second(self) -> float | None:
        """The rate at which this instance goes through its own samples while it waits for nobody else."""
        working = self.window.seconds * self.window.share("train", "input_wait")
        return self.window.updates * self.local_batch / working if working > 0 and self.window.updates else None


def instance_file(run: Run, index: int) -> Path:
    return run.monitor / f"instance-{index}.json"


def forget_instances(run: Run, count: int) -> None:
    """Remove the files of instances that are no more, as there are `count` of them now."""
    for index in _written(run):
        if index >= count:
            with suppress(OSError):
                instance_file(run, index).unlink(missing_ok=True)


def _written(run: Run) -> list[int]:
    with suppress(OSError):
        names = [_NAME.fullmatch(entry.name) for entry in run.monitor.iterdir()]
        return sorted(int(match[1]) for match in names if match)[:MAX_INSTANCES]
    return []


def read_instances(run: Run) -> list[InstanceState]:
    """Return what the instances have said last, in order; damaged files, and those of earlier instances, are left
    out."""
    found: list[InstanceState] = []
    for index in _written(run):
        with suppress(OSError, ValueError, ValidationError):
            state = InstanceState.model_validate(parse_mapping(read_limited(instance_file(run, index), _FILE_BYTES)))
            if state.instance == index and index < (found[0].instances if found else state.instances):
                found.append(state)
    return found
