"""The commands that use what a training has made."""

import os
from pathlib import Path
from typing import Annotated

import typer

from podium.cli.options import Code, NumInstances, RunFolder, Trust, WhichCheckpoint
from podium.errors import UserError
from podium.training.stop_request import StopRequest


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


def verify(
    run: RunFolder,
    updates: Annotated[
        str | None, typer.Option(help="From where to where, as in 400:450.", show_default="all updates")
    ] = None,
    instances: NumInstances = None,
    keep: Annotated[
        Path | None, typer.Option(help="New folder for what is made again.", show_default="none: it is removed")
    ] = None,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Make updates of a run again and compare them to the bit: exit code 0 if they are equal, else 1."""
    with StopRequest(os.getpid()) as stop:
        from podium.commands.verify import verify

        if not verify(run, updates, instances, keep, stop):
            raise typer.Exit(1)


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
    from podium.runs.folder import open_run

    if input is None and output is None:
        runs.predict(open_run(run), checkpoint, overrides or [])
        return
    if input is None or output is None:
        raise UserError("--input and --output go together")
    if overrides:
        raise UserError("keys of workload.data do not apply to samples from --input")
    runs.predict_file(open_run(run), checkpoint, input, output)


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
