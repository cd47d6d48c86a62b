"""What is done with a run after training: validate, predict, average, export, show it, and print its end."""

import typing
from collections.abc import Iterable
from pathlib import Path

from podium.checkpoints import huggingface
from podium.checkpoints import reading as checkpoints
from podium.checkpoints.reading import Checkpoint
from podium.checkpoints.writing import write_weights
from podium.contract import Split
from podium.errors import UserError
from podium.optim.averaging import averaged
from podium.recipe.loading import Recipe, parse_override, recipe_with
from podium.recipe.sections.average import Method
from podium.runs.folder import Run
from podium.training.build import Training, build_training
from podium.training.evaluate import evaluate
from podium.ui.console import out, say, show_table, warn
from podium.ui.run_summary import summary_table
from podium.ui.streams import results_are_kept
from podium.ui.table import Table


def validate(run: Run, split: str, which: str) -> None:
    """Print loss and metrics of a checkpoint on a split, as a table."""
    if split not in typing.get_args(Split):
        raise UserError(f"--split {split}: expected one of {', '.join(typing.get_args(Split))}")
    if which == "all":
        _validate_all(run, typing.cast(Split, split))
        return
    training, found = _restored(run, which)
    means = _evaluated(training, typing.cast(Split, split))
    rows = [[f"{split}/{name}", f"{value:.6g}"] for name, value in means.items()]
    show_table(Table(f"{run.path} after update {found.update}", ["metric", "value"], rows, _state_note(run)))


def _validate_all(run: Run, split: Split) -> None:
    """Print one row for each checkpoint; warn of damaged ones and leave them out."""
    paths = checkpoints.checkpoint_paths(run.checkpoints)
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet")
    training = _built(run)
    names: list[str] = []
    rows = []
    for path in paths:
        try:
            found = checkpoints.load(path)
        except UserError as error:
            warn(str(error))
            continue
        found.restore(training.state.model)
        means = _evaluated(training, split)
        names = list(means)
        rows.append([str(found.update), *(f"{value:.6g}" for value in means.values())])
    columns = ["update", *(f"{split}/{name}" for name in names)]
    show_table(Table(str(run.path), columns, rows, _state_note(run)))


def _state_note(run: Run) -> str:
    """Return a sentence on a run that is not complete, else nothing."""
    state = run.state()
    return "" if state == "done" else f"the run is {state}" if state == "running" else f"the run was {state}"


def average(run: Run, num_last: int, method: Method, decay: float) -> None:
    """Average the weights of the last checkpoints, write them to the run, and validate them."""
    paths = checkpoints.checkpoint_paths(run.checkpoints)[-num_last:]
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet")
    if len(paths) < num_last:
        warn(
            f"{run.path} has {len(paths)} checkpoint{'s' if len(paths) > 1 else ''}, not {num_last}: averaging what "
            "there is (checkpoint.keep sets how many a training keeps)"
        )
    found = [checkpoints.load(path) for path in paths]
    training = _built(run)
    rows = []
    for one in found:
        one.restore(training.state.model)
        rows.append([f"update {one.update}", *(f"{v:.6g}" for v in _evaluated(training, "valid").values())])
    weights = averaged((one.weights for one in found), method, decay)
    path = write_weights(run.average, found[-1].update, weights, {"averaged": [one.update for one in found]})
    checkpoints.load(path).restore(training.state.model)
    means = _evaluated(training, "valid")
    rows.append([f"{method} of these", *(f"{value:.6g}" for value in means.values())])
    show_table(Table(str(run.path), ["weights", *(f"valid/{name}" for name in means)], rows))
    out.print(f"written: {path} (--checkpoint average)", soft_wrap=True)


def _evaluated(training: Training, split: Split) -> dict[str, float]:
    section = training.recipe.valid
    return evaluate(
        training.state.model,
        training.task.workload,
        training.task.workload.source(split),
        micro_batch=section.micro,
        device=training.placement.device,
        max_samples=section.max_samples,
    )


def predict(run: Run, which: str, overrides: Iterable[str] = ()) -> None:
    """Draw the pictures of a checkpoint again and print its tables; `overrides` change `workload.data` for it."""
    from podium.runs.report import draw_report  # with matplotlib, which takes long to import

    keys = dict(map(parse_override, overrides))
    for key in keys:
        if not key.startswith("workload.data."):
            raise UserError(f"{key} cannot be changed after training: only keys of workload.data can")
    training, found = _restored(run, which, recipe_with(run.recipe(), keys))
    say(f"predicting with the checkpoint of update {found.update}")
    report = draw_report(
        run, training.task.workload, training.state.model, training.placement.device, training.recipe.valid.micro
    )
    report.write()
    for table in report.prediction.tables:
        show_table(table)
    for picture in report.prediction.pictures:
        out.print(f"{picture.title}: {picture.path}", soft_wrap=True)
    out.print(f"report: {run.report_file}", soft_wrap=True)


def print_summary(run: Run) -> None:
    """Print the last lines of a training."""
    results_are_kept()
    summary = run.summary()
    show_table(summary_table(str(run.path), summary))
    if run.report_file.exists():
        out.print(f"report: {run.report_file.resolve()}", soft_wrap=True)
    loss = summary["valid"]["last"].get("loss")
    if loss is not None:
        out.print(f"final validation loss: {loss:.4f}")


def export(run: Run, which: str, folder: Path | None) -> None:
    """Write a checkpoint's model as Hugging Face's libraries read it."""
    training, found = _restored(run, which)
    folder = folder or run.path / "huggingface"
    say(f"exporting the checkpoint of update {found.update}")
    for path in huggingface.export(training.task.workload, training.state.model, training.recipe.workload.name, folder):
        out.print(str(path), soft_wrap=True)


def _restored(run: Run, which: str, recipe: Recipe | None = None) -> tuple[Training, Checkpoint]:
    found = _find(run, which)
    training = _built(run, recipe)
    found.restore(training.state.model)
    return training, found


def _built(run: Run, recipe: Recipe | None = None) -> Training:
    return build_training(recipe or run.recipe(), threads=run.environment().get("threads_per_replica"))


def _find(run: Run, which: str) -> Checkpoint:
    if which == "last":
        found = checkpoints.load_latest(run.checkpoints, warn)
        if found is None:
            raise UserError(f"{run.path} has no checkpoint yet")
        return found
    if which == "average":
        paths = checkpoints.checkpoint_paths(run.average)
        if not paths:
            raise UserError(f"{run.path} has no averaged weights: `podium average {run.path}` writes them")
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
