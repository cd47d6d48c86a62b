"""The commands and their options. Heavy modules are imported inside the commands, so that `podium --help` is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from podium import __version__
from podium.errors import PodiumError, UserError
from podium.machine.memory_shortage import check_address_space, memory_shortage
from podium.training.stop_request import StopRequest
from podium.ui.streams import lost_results, outlive_readers
from podium.ui.visible import visible_sentence

# torch's libraries report every failed look-up of a host name. They read this when they are loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch's profiler reports when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

app = typer.Typer(
    name="podium",
    help="Train deep-learning models from one recipe, with the same weights on any number of processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make, inspect and download data.", no_args_is_help=True)
app.add_typer(data_app, name="data")

#: of an error; what files hold may be quoted in it
_SENTENCE = 4000

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped name (`podium recipes`) or a .yaml file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides such as optim.lr=2e-3.", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
NumInstances = Annotated[
    str | None,
    typer.Option(help="Number of processes, or `auto`: as many as keep the cores busy.", show_default="the minimum"),
]
Hosts = Annotated[str | None, typer.Option(help="Hosts that share the instances, e.g. a,b; they meet at the first.")]
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
        from podium.errors import UserError
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
WhichCheckpoint = Annotated[str, typer.Option(help="`last`, `best`, `average` or the number of an update.")]


def main() -> NoReturn:
    """Run a command; the project's own errors become one sentence and an exit code."""
    outlive_readers()
    code: str | int | None = 0
    try:
        app(standalone_mode=True)
    except PodiumError as error:
        print(f"podium: {visible_sentence(str(error)[:_SENTENCE])}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        from podium.workloads.registry import explain_own

        shown = memory_shortage(error) or explain_own(error)
        if shown is None:
            raise
        print(f"podium: {visible_sentence(str(shown)[:_SENTENCE])}", file=sys.stderr)
        code = shown.exit_code if isinstance(shown, PodiumError) else UserError.exit_code
    if (reason := lost_results()) and not code:
        print(f"podium: the results could not be written to standard output: {reason}", file=sys.stderr)
        code = UserError.exit_code
    sys.exit(code)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


#: commands that do without torch
_LIGHT = ("show", "recipes", "data", "doctor")


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in _LIGHT:
        check_address_space()


@app.command()
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
) -> None:
    """Train a recipe."""
    with StopRequest(os.getpid()) as stop:
        from podium.commands import train

        train.train(recipe, overrides or [], out, instances, hosts, join, stop, secret_file)


@app.command()
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
) -> None:
    """Continue a run from its newest good checkpoint, on any number of instances and stages."""
    with StopRequest(os.getpid()) as stop:
        from podium.commands import train

        train.resume(run, overrides or [], instances, hosts, join, stop, checkpoint, secret_file, accept_changes)


@app.command()
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
) -> None:
    """Train longer: continue a run that has ended, as a new run with its history."""
    with StopRequest(os.getpid()) as stop:
        from podium.commands.extend import extend

        extend(run, overrides or [], out, instances, stop)


@app.command()
def topology(
    recipe: RecipeName, overrides: Overrides = None, instances: NumInstances = None, hosts: Hosts = None
) -> None:
    """Draw which host and instance carries which replicas and stages."""
    from podium.commands import train

    train.topology(recipe, overrides or [], instances, hosts)


@app.command()
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


@app.command()
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
) -> None:
    """Predict time, throughput and memory of a training, here or on more hosts."""
    from podium.commands import plan

    if history:
        plan.show_history()
        return
    plan.plan(
        plan.Asked(recipe, overrides or [], instances, hosts, per_host, network, measure, seconds, table, scaling, plot)
    )


@app.command()
def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    rates: Annotated[bool, typer.Option("--rates", help="Only the three rates: input, compute, both.")] = False,
    trace: Annotated[Path | None, typer.Option(help="New file for a trace of a few updates (.json).")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each of the nine measurements.")] = 3.0,
) -> None:
    """Measure whether input or compute limits a training here, and which operators take its time."""
    from podium.commands.profile import run_profile

    run_profile(recipe, overrides or [], rates_only=rates, trace=trace, seconds=seconds)


@app.command()
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


@app.command()
def validate(
    run: RunFolder,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "valid",
    checkpoint: Annotated[
        str, typer.Option(help="`last`, `best`, `average`, the number of an update, or `all`.")
    ] = "last",
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Compute loss and metrics of one checkpoint, or of all."""
    from podium.commands import runs
    from podium.runs.folder import open_run

    runs.validate(open_run(run), split, checkpoint)


@app.command()
def predict(
    run: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of workload.data for this prediction.", show_default=False),
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    input: Annotated[
        Path | None, typer.Option(help="New samples: .npz, .npy, .h5, .csv, or a folder of the workload's data.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New .npz file for the model's outputs.")] = None,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Write the pictures and tables of a checkpoint into the run's report, or predict from new samples."""
    from podium.commands import runs
    from podium.errors import UserError
    from podium.runs.folder import open_run

    if input is None and output is None:
        runs.predict(open_run(run), checkpoint, overrides or [])
        return
    if input is None or output is None:
        raise UserError("--input and --output go together")
    if overrides:
        raise UserError("keys of workload.data do not apply to samples from --input")
    runs.predict_file(open_run(run), checkpoint, input, output)


@app.command()
def export(
    run: RunFolder,
    form: Annotated[
        str, typer.Option("--format", help="safetensors, torch_export, onnx or huggingface.")
    ] = "huggingface",
    out: Annotated[
        Path | None, typer.Option(help="File (huggingface: folder) to write.", show_default="in the run folder")
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Write the model for other programs, and check that it gives the same outputs there."""
    from podium.commands import runs
    from podium.runs.folder import open_run

    runs.export(open_run(run), checkpoint, out, form)


@app.command()
def average(
    run: RunFolder,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints to average.")] = 5,
    method: Annotated[str, typer.Option(help="mean or exponential.")] = "mean",
    decay: Annotated[float, typer.Option(help="exponential: weight of the older ones at each step.")] = 0.97,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Average the weights of the newest checkpoints, and validate the result."""
    from podium.commands import runs
    from podium.runs.folder import open_run

    if method not in ("mean", "exponential"):
        raise UserError(f"--method {method}: expected mean or exponential")
    if not 0 < decay < 1:
        raise UserError(f"--decay {decay:g}: expected a number between 0 and 1")
    runs.average(open_run(run), last, "mean" if method == "mean" else "exponential", decay)


@app.command()
def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILTER", help="Only those whose name or text has all of these.", show_default=False),
    ] = None,
) -> None:
    """List the shipped recipes, all or some."""
    from podium.commands.recipes import list_recipes

    list_recipes(words or [])


@app.command()
def workloads() -> None:
    """List what can be trained, and where it comes from."""
    from podium.commands.workloads import list_workloads

    list_workloads()


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder to write, and name of its files.")],
    like: Annotated[str, typer.Option(help="regression, classification, language or images.")] = "regression",
) -> None:
    """Write a workload of your own to begin with: model, data, recipe, test."""
    from podium.commands.new import new

    new(name, like)


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A shipped name, a .yaml file or a run folder.")],
    overrides: Overrides = None,
) -> None:
    """Print a recipe with everything resolved, or that of a run with its state."""
    from podium.commands.show import show

    show(recipe, overrides or [])


@app.command()
def doctor() -> None:
    """Check the machine and say what is missing."""
    from podium.commands.doctor import examine

    if not examine():
        raise typer.Exit(2)


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
