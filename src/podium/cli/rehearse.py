"""`podium rehearse`. Loads nothing heavy: the work is in `commands/rehearse.py`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from podium.cli.options import Overrides, RecipeName
from podium.cli.submit import SiteName


class TargetChoice(StrEnum):
    """Where a job would go."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    ssh = "ssh"


def rehearse(
    target: Annotated[TargetChoice, typer.Argument(help="Where the job would go.")],
    recipe: RecipeName,
    overrides: Overrides = None,
    site: SiteName = None,
    keep: Annotated[
        Path | None, typer.Option(help="New folder for the runs and logs of the rehearsal.", show_default="removed")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to train, beside restarts.")] = 12.0,
) -> None:
    """Run a job small, here, as its target would: preempted, timed out, losing a node; and compare the weights."""
    from podium.commands.rehearse import rehearse

    if not rehearse(target.value, recipe, overrides or [], site, keep, seconds):
        raise typer.Exit(1)
