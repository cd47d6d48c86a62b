"""The commands that train."""

import os
from pathlib import Path
from typing import Annotated

import typer

from podium.cli.options import (
    Code,
    Hosts,
    Join,
    NumInstances,
    Overrides,
    RecipeName,
    RunFolder,
    SecretFile,
    Trust,
    Until,
)
from podium.errors import UserError
from podium.machine.interpreter import loading
from podium.training.stop_request import StopRequest


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the new run.", show_default="the next free one in runs/")
    ] = None,
    instances: NumInstances = None,
    hosts: Hosts = None,
    join: Join = False,
    secret_file: SecretFile = None,
    until: Until = None,
    goes_on: Annotated[
        bool, typer.Option("--continue", help="Continue the run in --out, if there is one: for jobs that start again.")
    ] = False,
    pretends: Annotated[
        bool,
        typer.Option(
            "--pretend",
            help="Only try a pod's recipe here, small; --instances and --hosts (also a number) are its.",
        ),
    ] = False,
) -> None:
    """Train a recipe."""
    if pretends:
        _pretend(recipe, overrides or [], out, instances, hosts, others=join or goes_on or until is not None)
        return
    with StopRequest(os.getpid(), until) as stop:
        with loading():
            from podium.commands import train

        train.train(recipe, overrides or [], out, instances, hosts, join, stop, secret_file, goes_on=goes_on)


def _pretend(
    recipe: str, overrides: list[str], out: Path | None, instances: str | None, hosts: str | None, *, others: bool
) -> None:
    if others:
        raise UserError("--pretend trains nothing that goes on: leave --join, --continue and --until out")
    from podium.commands.pretend import pretend

    pretend(recipe, overrides, out, instances, hosts)


def resume(
    run: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of parallel and launch.", show_default=False),
    ] = None,
    instances: NumInstances = None,
    hosts: Hosts = None,
    join: Join = False,
    checkpoint: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this update; later ones are removed.")
    ] = None,
    secret_file: SecretFile = None,
    trust: Trust = False,
    code: Code = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although recipe.yaml was edited since the checkpoint.")
    ] = False,
    until: Until = None,
) -> None:
    """Continue a run from its newest good checkpoint, on any number of instances and stages."""
    with StopRequest(os.getpid(), until) as stop:
        with loading():
            from podium.commands import train

        train.resume(run, overrides or [], instances, hosts, join, stop, checkpoint, secret_file, accept_changes)


def extend(
    run: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="train.length=+10ep, or the new length.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the new run.", show_default="the next free one beside RUN")
    ] = None,
    instances: NumInstances = None,
    trust: Trust = False,
    code: Code = None,
    only_exact: Annotated[
        bool, typer.Option("--only-exact", help="Refuse where a training as long from the start would differ.")
    ] = False,
) -> None:
    """Train longer: continue a run that has ended, as a new run with its history."""
    with StopRequest(os.getpid()) as stop:
        with loading():
            from podium.commands.extend import extend

        extend(run, overrides or [], out, instances, stop, only_exact=only_exact)


def join(
    run: RunFolder,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="How many to add.", show_default="1 here; elsewhere as many as there are cores for"),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="Where the hosts of the run meet, as in 10.0.0.1:29400.", show_default="RUN says")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="What to call this machine in the run.", show_default="its name")
    ] = None,
    secret_file: SecretFile = None,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Add instances to a training that is under way: here, or this machine's cores to one on other machines."""
    from podium.commands import joining

    joining.join(run, instances, at, host, secret_file)


def leave(
    run: RunFolder,
    host: Annotated[
        str | None, typer.Option(help="The host that leaves, with all of its instances.", show_default="this one")
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="How many leave.", show_default=False)] = None,
) -> None:
    """Take instances or a host away from a training that goes on without them."""
    from podium.commands import joining

    joining.leave(run, instances, host)


def topology(
    recipe: RecipeName, overrides: Overrides = None, instances: NumInstances = None, hosts: Hosts = None
) -> None:
    """Draw which host and instance carries which replicas and stages."""
    from podium.commands import train

    train.topology(recipe, overrides or [], instances, hosts)
