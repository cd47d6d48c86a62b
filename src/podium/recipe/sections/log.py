"""The `log` section: where metric records go. `runs/metrics.py` writes them."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from podium.recipe.section import Section

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class LogSection(Section):
    """Where metric records go in addition to `metrics.jsonl`, and whether pictures are made at the end."""

    tensorboard: bool = True
    #: predict after the last update and write report.html (`podium predict` does it later)
    report: bool = True
    #: measure how busy the machine is, and write what `podium monitor` shows
    monitor: bool = True
    #: weights are digested for every record, or after every update, so that `podium verify` can name single ones
    digests: Literal["records", "updates"] = "records"
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "podium"
    #: MLflow: `off`, `local` (files in `mlruns` beside the run folders) or the address of a tracking server
    mlflow: str = "off"
    #: Trackio: `off`, `local` (its database on this machine) or the address of a server
    trackio: str = "off"
    #: experiment of MLflow, project of Trackio
    project: Annotated[str, Field(min_length=1)] = "podium"
    #: classes of the user, `mine.py:Watcher` or `package.module:Watcher`, told what happens (runs/observers.py)
    observers: tuple[str, ...] = ()
    #: seconds after which an observer that has not come back is switched off
    observer_timeout: Annotated[float, Field(gt=0, le=86400)] = 60.0

    @field_validator("mlflow", "trackio")
    @classmethod
    def _tracker(cls, value: str) -> str:
        if value not in ("off", "local") and "://" not in value:
            raise ValueError("expected off, local or the address of a server, such as http://localhost:5000")
        return value

    @field_validator("observers")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            place, _, member = name.rpartition(":")
            if not member.isidentifier() or not (place.endswith(".py") or _MODULE.fullmatch(place)):
                raise ValueError("expected names of the form mine.py:Watcher or package.module:Watcher")
        return value
