"""What is done with a run after training: validate, predict, average, export, show it, and print its end."""

import typing
from collections.abc import Iterable
from pathlib import Path

from podium.checkpoints import exporting, huggingface
from podium.checkpoints import reading as checkpoints
from podium.checkpoints.writing import write_weights
from podium.contract import Split
from podium.data.formats.array_files import check_new_arrays, read_arrays, write_arrays
from podium.errors import UserError
from podium.optim.averaging import averaged
from podium.recipe.loading import recipe_with
from podium.recipe.overrides import parse_override
from podium.recipe.sections.average import Method
from podium.runs.folder import Run
from podium.runs.restored import plain_recipe, rebuilt, restored
from podium.runs.tensorboard import add_prediction
from podium.training.build import Training
from podium.training.evaluate import evaluate
from podium.training.inference import array_batches, fitting_inputs, input_fields, model_outputs, source_batches
from podium.training.recalibration import recalibrated
from podium.ui.console import out, say, show_table, warn
from podium.ui.table import Table


def validate(run: Run, split: str, which: str) -> None:
    """Print loss and metrics of a checkpoint on a split, as a table."""
    if split not in typing.get_args(Split):
        raise UserError(f"--split {split}: expected one of {', '.join(typing.get_args(Split))}")
    if which == "all":
        _validate_all(run, typing.cast(Split, split))
        return
    training, found = restored(run, which)
    means = _evaluated(training, typing.cast(Split, split), found.update)
    rows = [[f"{split}/{name}", f"{value:.6g}"] for name, value in means.items()]
    show_table(Table(f"{run.path} after update {found.update}", ["metric", "value"], rows, _state_note(run)))


def _validate_all(run: Run, split: Split) -> None:
    """Print one row for each checkpoint; warn of damaged ones and leave them out."""
    paths = checkpoints.checkpoint_paths(run.checkpoints)
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet")
    training = rebuilt(run)
    names: list[str] = []
    rows = []
    for path in paths:
        try:
            found = checkpoints.load(path)
        except UserError as error:
            warn(str(error))
            continue
        found.restore(training.state.model)
        means = _evaluated(training, split, found.update)
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
    training = rebuilt(run)
    rows = []
    for one in found:
        one.restore(training.state.model)
        rows.append([f"update {one.update}", *(f"{v:.6g}" for v in _evaluated(training, "valid", one.update).values())])
    weights = averaged((one.weights for one in found), method, decay)
    path = write_weights(run.average, found[-1].update, weights, {"averaged": [one.update for one in found]})
    checkpoints.load(path).restore(training.state.model)
    means = _evaluated(training, "valid", found[-1].update)
    rows.append([f"{method} of these", *(f"{value:.6g}" for value in means.values())])
    show_table(Table(str(run.path), ["weights", *(f"valid/{name}" for name in means)], rows))
    out.print(f"written: {path} (--checkpoint average)", soft_wrap=True)


def _evaluated(training: Training, split: Split, update: int) -> dict[str, float]:
    """Return loss and metrics of the restored weights, which are those after `update`."""
    section = training.recipe.valid
    with recalibrated(training, training.state.model, update):
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
    from podium.report.prediction import draw_report

    recipe = run.recipe()
    keys = dict(parse_override(text, type(recipe)) for text in overrides)
    for key in keys:
        if not key.startswith("workload.data."):
            raise UserError(f"{key} cannot be changed after training: only keys of workload.data can")
    training, found = restored(run, which, recipe_with(recipe, keys))
    say(f"predicting with the checkpoint of update {found.update}")
    report = draw_report(
        run, training.task.workload, training.state.model, training.placement.device, training.recipe.valid.micro
    )
    add_prediction(run, recipe.log, found.update, report.prediction, training.state.model)
    report.write()
    for table in report.prediction.tables:
        show_table(table)
    for picture in report.prediction.pictures:
        out.print(f"{picture.title}: {picture.path}", soft_wrap=True)
    out.print(f"report: {run.report_file}", soft_wrap=True)


def predict_file(run: Run, which: str, source: Path, target: Path) -> None:
    """Write the model's outputs for the samples of a file, or of a folder of the workload's data, as .npz."""
    recipe = run.recipe()
    check_new_arrays(target)
    if source.is_dir():
        recipe = recipe_with(recipe, {"workload.data.path": str(source)})
    training, found = restored(run, which, recipe)
    workload, micro = training.task.workload, training.recipe.valid.micro
    say(f"predicting with the checkpoint of update {found.update}")
    samples = workload.source("test" if source.is_dir() else "valid")
    device = training.placement.device
    if source.is_dir():
        batches = source_batches(samples, micro, device)
    else:
        needed = {name: samples.fields[name] for name in input_fields(workload, samples.fields)}
        batches = array_batches(fitting_inputs(read_arrays(source), needed, source), micro, device)
    outputs = model_outputs(training.state.model, workload.inputs, batches)
    if not outputs:
        raise UserError(f"{source} holds no samples")
    write_arrays(target, outputs)
    rows = [[name, str(array.dtype), " × ".join(map(str, array.shape))] for name, array in outputs.items()]
    show_table(Table(str(target), ["output", "type", "shape"], rows))


def export(run: Run, which: str, path: Path | None, form: str) -> None:
    """Write a checkpoint's model for other programs, and compare it with the original."""
    if form not in exporting.FORMATS:
        raise UserError(f"--format {form}: expected one of {', '.join(exporting.FORMATS)}")
    if form == "huggingface":
        training, found = restored(run, which)
        say(f"exporting the checkpoint of update {found.update}")
        model, name = training.state.model, training.recipe.workload.name
        for file in huggingface.export(training.task.workload, model, name, path or run.path / "huggingface"):
            out.print(str(file), soft_wrap=True)
        return
    training, found = restored(run, which, plain_recipe(run))
    say(f"exporting the checkpoint of update {found.update}")
    workload, model = training.task.workload, training.state.model
    inputs = [workload.inputs(workload.example(count)) for count in (2, 3)]
    facts = {"update": str(found.update), "workload": training.recipe.workload.name}
    path = path or run.path / "export" / f"model{exporting.SUFFIXES[form]}"
    compared = exporting.export_model(form, model, inputs, path, facts)
    out.print(f"{path}: {compared}", soft_wrap=True)
