"""The `log` section: where metric records go. `runs/metrics.py` writes them."""

from typing import Literal

from podium.recipe.section import Section


class LogSection(Section):
    """Where metric records go in addition to `metrics.jsonl`, and whether pictures are made at the end."""

    tensorboard: bool = True
    #: predict after the last update and write report.html (`podium predict` does it later)
    report: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "podium"
    #: MLflow: `off`, `local` (files in `mlruns` beside the run folders) or the address of a tracking server
    mlflow: str = "off"
    #: Trackio: `off`, `local` (its database on this machine) or the address of a server
    trackio: str = "off"
    #: experiment of MLflow, project of Trackio
    project: str = "podium"
    #: classes of the user, `mine.py:MyLogger` or `package.module:MyLogger`, told what happens (runs/observers.py)
    observers: tuple[str, ...] = ()
