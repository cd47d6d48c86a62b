"""What is done with a run after training: validate a checkpoint, predict with it, say how it ended."""

import typing
from collections.abc import Iterable
from pathlib import Path

from podium import checkpoint as checkpoints
from podium import huggingface
from podium.averaging import Method, averaged
from podium.checkpoint import Checkpoint
from podium.console import number, out, say, show_table, warn
from podium.errors import UserError
from podium.evaluate import evaluate
from podium.prepare import Prepared, prepare
from podium.recipe import Recipe, parse_override, recipe_with
from podium.run import Run
from podium.saving import write_weights
from podium.table import Table
from podium.workloads.base import Split


def validate(run: Run, split: str, which: str) -> None:
    """Prints loss and metrics of a checkpoint on a split, as a table."""
    if split not in typing.get_args(Split):
        raise UserError(f"--split {split}: expected one of {', '.join(typing.get_args(Split))}")
    if which == "all":
        _validate_all(run, typing.cast(Split, split))
        return
    prepared, found = _restored(run, which)
    means = _evaluated(prepared, typing.cast(Split, split))
    rows = [[f"{split}/{name}", f"{value:.6g}"] for name, value in means.items()]
    show_table(Table(f"{run.path} after update {found.update}", ["metric", "value"], rows))


def _validate_all(run: Run, split: Split) -> None:
    """One row for each checkpoint; damaged ones are told and left out."""
    paths = checkpoints.checkpoint_paths(run.checkpoints)
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet")
    prepared = _prepared(run)
    names: list[str] = []
    rows = []
    for path in paths:
        try:
            found = checkpoints.load(path)
        except UserError as error:
            warn(str(error))
            continue
        found.restore(prepared.model)
        means = _evaluated(prepared, split)
        names = list(means)
        rows.append([str(found.update), *(f"{value:.6g}" for value in means.values())])
    show_table(Table(f"{run.path}", ["update", *(f"{split}/{name}" for name in names)], rows))


def average(run: Run, num_last: int, method: Method, decay: float) -> None:
    """Averages the weights of the last checkpoints, writes them beside and says how they do."""
    paths = checkpoints.checkpoint_paths(run.checkpoints)
    if len(paths) < num_last:
        raise UserError(
            f"{run.path} has {len(paths)} checkpoints, not {num_last}: `checkpoint.keep` says how many training keeps"
        )
    found = [checkpoints.load(path) for path in paths[-num_last:]]
    prepared = _prepared(run)
    rows = []
    for one in found:
        one.restore(prepared.model)
        rows.append([f"update {one.update}", *(f"{v:.6g}" for v in _evaluated(prepared, "valid").values())])
    weights = averaged((one.weights for one in found), method, decay)
    path = write_weights(run.average, found[-1].update, weights, {"averaged": [one.update for one in found]})
    checkpoints.load(path).restore(prepared.model)
    means = _evaluated(prepared, "valid")
    rows.append([f"{method} of these", *(f"{value:.6g}" for value in means.values())])
    show_table(Table(str(run.path), ["weights", *(f"valid/{name}" for name in means)], rows))
    out.print(f"written: {path} (--checkpoint average)", soft_wrap=True)


def _evaluated(prepared: Prepared, split: Split) -> dict[str, float]:
    section = prepared.recipe.valid
    return evaluate(
        prepared.model,
        prepared.workload,
        prepared.workload.source(split),
        micro_batch=section.micro,
        device=prepared.device,
        max_samples=section.max_samples,
    )


def predict(run: Run, which: str, overrides: Iterable[str] = ()) -> None:
    """Draws the pictures of a checkpoint anew and shows its tables; `overrides` change `workload.data` for it."""
    from podium.report import write_report  # draws with matplotlib, which takes long to import

    keys = dict(map(parse_override, overrides))
    for key in keys:
        if not key.startswith("workload.data."):
            raise UserError(f"{key} cannot be changed after training: only keys of workload.data can")
    prepared, found = _restored(run, which, recipe_with(run.recipe(), keys))
    say(f"predicting with the checkpoint of update {found.update}")
    prediction = write_report(run, prepared.workload, prepared.model, prepared.device, prepared.recipe.valid.micro)
    for table in prediction.tables:
        show_table(table)
    for picture in prediction.pictures:
        out.print(f"{picture.title}: {picture.path}", soft_wrap=True)
    out.print(f"report: {run.report_file}", soft_wrap=True)


def tell_end(run: Run) -> None:
    """The last lines of a training."""
    summary = run.summary()
    seconds = summary["seconds"]
    spent = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in seconds.items() if value >= 0.05)
    rows = [[f"validation {name}", number(value)] for name, value in summary["valid"]["last"].items()]
    rows += [["best validation loss", number(summary["valid"]["best"]["loss"])]] if summary["valid"]["best"] else []
    rows += [
        ["updates", f"{summary['updates']:,}"],
        ["samples/s", number(summary["samples_per_second"])],
        ["processor in use", f"{summary['cpu_percent']:.0f} %"],
        ["weights", summary["weights_sha256"][:16]],
    ]
    show_table(Table(f"{run.path}: {summary['state']}", ["", ""], rows, spent))
    if run.report_file.exists():
        out.print(f"report: {run.report_file.resolve()}", soft_wrap=True)
    loss = summary["valid"]["last"].get("loss")
    if loss is not None:
        out.print(f"final validation loss: {loss:.4f}")


def export(run: Run, which: str, folder: Path | None) -> None:
    """Writes a checkpoint's model as Hugging Face's libraries read it."""
    prepared, found = _restored(run, which)
    folder = folder or run.path / "huggingface"
    say(f"exporting the checkpoint of update {found.update}")
    for path in huggingface.export(prepared.workload, prepared.model, prepared.recipe.workload.name, folder):
        out.print(str(path), soft_wrap=True)


def _restored(run: Run, which: str, recipe: Recipe | None = None) -> tuple[Prepared, Checkpoint]:
    found = _find(run, which)
    prepared = _prepared(run, recipe)
    found.restore(prepared.model)
    return prepared, found


def _prepared(run: Run, recipe: Recipe | None = None) -> Prepared:
    return prepare(recipe or run.recipe(), threads=run.environment().get("threads_per_replica"))


def _find(run: Run, which: str) -> Checkpoint:
    if which == "last":
        found = checkpoints.load_latest(run.checkpoints, warn)
        if found is None:
            raise UserError(f"{run.path} has no checkpoint yet")
        return found
    if which == "average":
        paths = checkpoints.checkpoint_paths(run.average)
        if not paths:
            raise UserError(f"{run.path} has no averaged weights: `podium average {run.path}` makes them")
        return checkpoints.load(paths[-1])
    if which == "best":
        update = run.summary().get("valid", {}).get("best", {}).get("update")
        if update is None:
            raise UserError(f"{run.path} has no validated checkpoint yet")
    elif which.isdecimal():
        update = int(which)
    else:
        raise UserError(f"--checkpoint {which}: expected last, best, average or the number of an update")
    return checkpoints.load(checkpoints.path_of(run.checkpoints, update))
