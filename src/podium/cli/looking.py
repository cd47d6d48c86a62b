"""The commands that show what there is, and begin something new."""

from typing import Annotated

import typer

from podium.cli.options import Overrides, RunFolder


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILTER", help="Only those whose name or text has all of these.", show_default=False),
    ] = None,
) -> None:
    """List the shipped recipes, all or some."""
    from podium.commands.recipes import list_recipes

    list_recipes(words or [])


def workloads() -> None:
    """List what can be trained, and where it comes from."""
    from podium.commands.workloads import list_workloads

    list_workloads()


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder to write, and name of its files.")],
    like: Annotated[str, typer.Option(help="regression, classification, language or images.")] = "regression",
) -> None:
    """Write a workload of your own to begin with: model, data, recipe, test."""
    from podium.commands.new import new

    new(name, like)


def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A shipped name, a .yaml file or a run folder.")],
    overrides: Overrides = None,
) -> None:
    """Print a recipe with everything resolved, or that of a run with its state."""
    from podium.commands.show import show

    show(recipe, overrides or [])


def monitor(
    run: RunFolder,
    web: Annotated[bool, typer.Option("--web", help="As a page for browsers on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="--web: port on loopback; 0: a free one.")] = 0,
) -> None:
    """Watch a training from another terminal or host: curves, rates, who waits for whom, its log. q ends it."""
    from podium.commands import monitor
    from podium.runs.folder import open_run

    opened = open_run(run)
    monitor.serve(opened, port) if web else monitor.monitor(opened)


def doctor() -> None:
    """Check the machine and say what is missing."""
    from podium.commands.doctor import examine

    if not examine():
        raise typer.Exit(2)
