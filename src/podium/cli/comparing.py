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


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def compare(
    folders: Folders,
    json: Json = False,
    bits: Annotated[
        bool, typer.Option("--bits", help="Where two runs begin to differ, and in which tensors. Exit code 1 if so.")
    ] = False,
) -> None:
    """Show runs beside each other: results, costs, what differs in recipe and environment."""
    if bits:
        from podium.commands.bits import compare_bits

        if not compare_bits(folders, "json" if json else "table"):
            raise typer.Exit(1)
        return
    from podium.commands.compare import compare_runs
    from podium.commands.report import compared

    compare_runs(compared(folders)[0], "json" if json else "table")


def runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Where to look for runs.", show_default="runs")
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric of the validation to show.")] = "valid/loss",
    sort: Annotated[str, typer.Option(help="name, state, best, rate or age.")] = "name",
    json: Json = False,
    csv: Csv = False,
) -> None:
    """List runs: state, best metric, rate, age."""
    from podium.commands.compare import list_runs
    from podium.errors import UserError

    if json and csv:
        raise UserError("--json and --csv exclude each other")
    list_runs(folder, metric, sort, "json" if json else "csv" if csv else "table")


def board(
    folders: Folders,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any that is free.")] = 6006,
) -> None:
    """Open TensorBoard on runs, on this machine only, with their hyper-parameters."""
    from podium.commands.board import board

    board(folders, port)
