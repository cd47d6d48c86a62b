"""The commands that put runs beside each other. Load nothing heavy: runs are read without torch."""

from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN|STUDY|FOLDER...", help="Runs, a study, or folders with runs below them.")
]


def report(
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write.", show_default="report.html in the folder given")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Show the time to reach it: valid/loss=0.05, valid/accuracy>=0.9.", show_default="that of the study"
        ),
    ] = None,
) -> None:
    """Write one page about runs: curves, tables, differences, time to a target."""
    from podium.commands.report import report

    report(folders, out, target)
