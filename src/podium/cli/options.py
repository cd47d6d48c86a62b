"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from podium.errors import UserError

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped name (`podium recipes`) or a .yaml file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides such as optim.lr=2e-3.", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
NumInstances = Annotated[
    str | None,
    typer.Option(
        help="Number of processes; `auto`: as many as keep the cores busy; 2..8: of these as many, and they may come "
        "and go.",
        show_default="the minimum",
    ),
]
Hosts = Annotated[
    str | None, typer.Option(help="Hosts that share the instances, as in a,b or a:3,b:5; they meet at the first.")
]
Join = Annotated[
    bool,
    typer.Option(
        "--join", help="Start only this host's part; run the same, with the same secret, on every other host."
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(help="File with the secret by which hosts know each other; only you may read it.", show_default=False),
]


def _trust(given: bool) -> bool:
    if given:
        from podium.runs.own_code import CHOICE

        CHOICE.trust = True
    return given


def _code(given: str | None) -> str | None:
    if given is not None:
        from podium.runs.own_code import CHOICE

        if given not in ("copy", "now"):
            raise UserError(f"--code {given}: expected copy or now")
        CHOICE.which = "copy" if given == "copy" else "now"
    return given


Trust = Annotated[
    bool, typer.Option("--trust", callback=_trust, help="Let a run that was not made here run its workload's code.")
]
Code = Annotated[
    str | None,
    typer.Option("--code", callback=_code, help="If your workload has changed: the run's `copy`, or as it is `now`."),
]
Until = Annotated[
    str | None,
    typer.Option(help="Stop and save there, as after a signal: 5ep, 500up. Exit code 75.", show_default=False),
]
WhichCheckpoint = Annotated[str, typer.Option(help="`last`, `best`, `average` or the number of an update.")]
