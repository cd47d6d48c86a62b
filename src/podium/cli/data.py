"""`podium data` and its commands."""

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Make, inspect and download data.", no_args_is_help=True)


@data_app.command("make")
def data_make(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="`text`, or a workload whose data can be simulated: `neuron`.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="e.g. samples=50000 out=data; input=books tokenizer=bpe vocabulary=8192"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace data that already exists in `out`.")] = False,
) -> None:
    """Turn text into tokens, or simulate a data set."""
    from podium.commands.data import make

    make(what, options or [], force=force)


@data_app.command("info")
def data_info(path: Annotated[Path, typer.Argument(help="A data file or a folder of them.")]) -> None:
    """Describe data files."""
    from podium.commands.data_info import info

    info(path)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="A data set, e.g. mnist.")],
    out: Annotated[Path | None, typer.Option(help="Folder to put it in.", show_default="the cache")] = None,
) -> None:
    """Download a data set, verified and resumable."""
    from podium.commands.data import fetch_with_progress

    fetch_with_progress(name, out)
