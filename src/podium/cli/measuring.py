"""The commands that measure, try and predict before a training."""

from pathlib import Path
from typing import Annotated

import typer

from podium.cli.options import Join, Overrides, RecipeName, SecretFile


def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the fastest choice to this new recipe file, even if it changes bits.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to search, before a final comparison.")] = 60.0,
    lr: Annotated[bool, typer.Option("--lr", help="Look for a learning rate instead, with a range test.")] = False,
    updates: Annotated[int, typer.Option(min=20, help="--lr: how many rates to try.")] = 200,
    plot: Annotated[Path, typer.Option(help="--lr: new file for the plot (.png).")] = Path("learning-rates.png"),
) -> None:
    """Measure which settings run a recipe fastest on this machine, and remember them for training."""
    if lr:
        from podium.tune.lr_range import tune_lr

        tune_lr(recipe, overrides or [], updates, plot)
        return
    from podium.tune.tuner import tune

    tune(recipe, overrides or [], write, seconds)


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="A shipped name (`podium recipes`) or a .yaml file.", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides, and replicas=256 or replicas=1..1024.", show_default=False
        ),
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default="one")] = None,
    hosts: Annotated[str | None, typer.Option(help="How many hosts share the instances, or their names.")] = None,
    per_host: Annotated[
        int | None, typer.Option(min=1, help="For a range: instances on a host.", show_default="what the cores carry")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Between hosts: a preset such as ethernet-10g, or 20us,10Gb.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the parts of an update here first.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="--measure: how long, beside starting processes.")] = 20.0,
    table: Annotated[
        Path | None, typer.Option("--from", help="CSV: devices, and seconds_per_epoch or samples_per_second.")
    ] = None,
    scaling: Annotated[str, typer.Option(help="--from: weak or strong.")] = "weak",
    plot: Annotated[Path | None, typer.Option(help="With a range or --from: new file for the plot (.png).")] = None,
    history: Annotated[bool, typer.Option("--history", help="Show how earlier plans came out.")] = False,
    measure_network: Annotated[
        bool, typer.Option("--measure-network", help="Measure the network between --hosts a,b, which ssh reaches.")
    ] = False,
    join: Join = False,
    secret_file: SecretFile = None,
) -> None:
    """Predict time, throughput and memory of a training, here or on more hosts."""
    from podium.commands import plan
    from podium.commands.plan_grades import show_history

    if history:
        show_history()
        return
    plan.plan(
        plan.Asked(
            recipe,
            overrides or [],
            instances,
            hosts,
            per_host,
            network,
            measure,
            seconds,
            table,
            scaling,
            plot,
            measure_network,
            join,
            secret_file,
        )
    )


def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    rates: Annotated[bool, typer.Option("--rates", help="Only the three rates: input, compute, both.")] = False,
    trace: Annotated[Path | None, typer.Option(help="New file for a trace of a few updates (.json).")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each of the nine measurements.")] = 3.0,
    out: Annotated[
        Path | None, typer.Option(help="New folder for page and trace.", show_default="profiles/RECIPE-001 and so on")
    ] = None,
    instances: Annotated[
        int, typer.Option(min=1, help="Also measure as many together: who waits, what the exchange costs.")
    ] = 1,
) -> None:
    """Measure what limits a training here and where its time and memory go: tables, a page, and a trace."""
    from podium.commands.profile import run_profile

    run_profile(recipe, overrides or [], rates_only=rates, trace=trace, seconds=seconds, out=out, instances=instances)


def check(
    recipe: RecipeName,
    overrides: Overrides = None,
    keep: Annotated[
        Path | None, typer.Option(help="New folder for the trial runs.", show_default="none: they are removed")
    ] = None,
) -> None:
    """Check that a recipe keeps every promise: same weights on any number of instances, after a kill, in stages."""
    from podium.commands.check import check

    if not check(recipe, overrides or [], keep):
        raise typer.Exit(1)


def certify(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="Which ones.", show_default="all shipped ones")
    ] = None,
    out: Annotated[Path, typer.Option(help="New folder for card.json and card.html.")] = Path("certificate"),
    precision: Annotated[
        list[str] | None, typer.Option(help="A number format; may be given again.", show_default="all three")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each rate is measured.")] = 2.0,
) -> None:
    """Try on this machine's accelerators whether every promise holds, and how fast: ends in a card to send."""
    from podium.commands.certify import certify

    if not certify(workloads or [], out, precision or [], seconds):
        raise typer.Exit(1)
