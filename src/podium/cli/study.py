"""`podium study` and its options. Loads nothing heavy: the work is in `commands/study.py`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_BEGIN = "run"


class _Study(TyperGroup):
    """`podium study RECIPE …` begins or continues a study; what is asked about one has a word of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_BEGIN, *args]
        return super().parse_args(ctx, args)


study_app = typer.Typer(
    cls=_Study,
    help="Train a family of runs and compare them: `podium study RECIPE optim.lr=1e-3,2e-3`, or a study.yaml.",
    no_args_is_help=True,
)

StudyPath = Annotated[Path, typer.Argument(metavar="STUDY", help="A study folder.")]


@study_app.command(_BEGIN)
def run(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|STUDY.yaml|STUDY", help="A recipe, a study file, or a study to continue.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=V1,V2",
            help="Values to try: optim.lr=1e-3,2e-3; one value is for all runs.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The study folder.", show_default="studies/NAME")] = None,
    at_once: Annotated[
        str, typer.Option(help="Runs at the same time, or `auto`: as many as cores and memory allow.")
    ] = "auto",
    method: Annotated[str | None, typer.Option(help="grid, random or tpe.", show_default="grid")] = None,
    metric: Annotated[str | None, typer.Option(help="What runs are compared by.", show_default="valid/loss")] = None,
    mode: Annotated[str | None, typer.Option(help="Whether less (min) or more (max) of it is better.")] = None,
    target: Annotated[float | None, typer.Option(help="End when a value as good as this is reached.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How often to train each choice of values.", show_default="1")
    ] = None,
    runs: Annotated[int | None, typer.Option(help="At most this many runs.", show_default=False)] = None,
    time: Annotated[str | None, typer.Option(help="Stop after this time: 90s, 30m, 12h.", show_default=False)] = None,
    retries: Annotated[int, typer.Option(min=0, max=100, help="How often a run that crashes is tried again.")] = 2,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try runs that have failed once more.")] = False,
) -> None:
    """Begin a study, continue it, or add to it."""
    from podium.commands.study import Options, study

    given = {"method": method, "metric": metric, "mode": mode, "target": target, "seeds": seeds}
    study(what, words or [], out, Options(given, runs, time, at_once, retries, retry_failed))


@study_app.command("status")
def status(
    study: StudyPath,
    json: Annotated[bool, typer.Option("--json", help="Print all records as JSON.")] = False,
) -> None:
    """Show how far a study is, and its table so far."""
    from podium.commands.study import show_status

    show_status(study, as_json=json)


@study_app.command("export")
def export(
    study: StudyPath,
    to: Annotated[Path, typer.Option(help="New file: .log (for optuna.load_study), .csv or .json.")],
) -> None:
    """Write a study for other programs."""
    from podium.commands.study import export

    export(study, to)
