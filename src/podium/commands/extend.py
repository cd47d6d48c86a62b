"""`podium extend RUN train.length=+10ep`: a longer training that goes on where a run ended, in a new folder."""

import json
import os
import shutil
from pathlib import Path

from podium.checkpoints.reading import Checkpoint
from podium.checkpoints.writing import Snapshot, write
from podium.commands import train
from podium.errors import UserError
from podium.launch.environment import find_place
from podium.machine.atomic_files import create_folder
from podium.recipe.durations import Duration
from podium.recipe.loading import Recipe, recipe_with, to_yaml
from podium.runs import observer_code, own_code
from podium.runs.folder import Run, check_free, next_free_folder, open_run, write_json
from podium.runs.restored import find_checkpoint, rebuilt
from podium.training.stop_request import StopRequest
from podium.ui.console import say, warn


def extend(
    path: Path,
    overrides: list[str],
    out: Path | None,
    num_instances: str | None,
    stop: StopRequest,
    *,
    only_exact: bool = False,
) -> None:
    """Copy a run's recipe with another length, its history and its newest checkpoint, and resume from there.

    `only_exact`: raise UserError where weights or records would not be those of a training as long from the start.
    """
    if find_place(os.environ) is not None:
        raise UserError("`podium extend` starts its own instances: call it outside of srun and torchrun")
    run = open_run(path)
    if run.state() == "running":
        raise UserError(f"{path} is being trained: wait for its end, or stop it first")
    found = find_checkpoint(run, "last")
    before = run.recipe()
    recipe = recipe_with(before, {"train.length": str(_new_length(run, before, overrides))})
    folder = out or next_free_folder(path.resolve().parent, path.resolve().name)
    check_free(folder)
    difference = _difference(run, before, recipe, found.update, records=only_exact)
    if difference and only_exact:
        raise UserError(difference)
    warn(difference) if difference else say("the weights will be those of a training that was as long from the start")
    create_folder(folder, lambda aside: _fill(Run(aside), run, recipe, found))
    say(f"{folder} continues {path} after update {found.update}")
    train.resume(folder, [], num_instances, None, False, stop)


def _new_length(run: Run, before: Recipe, overrides: list[str]) -> Duration:
    keys = [text.partition("=")[0] for text in overrides]
    if keys != ["train.length"]:
        raise UserError("give the new length and nothing else, as train.length=+10ep or train.length=30ep")
    text = overrides[0].partition("=")[2]
    if not text.startswith("+"):
        return Duration.parse(text)
    more, length = Duration.parse(text[1:]), before.train.length
    if more.unit == length.unit:
        return Duration(length.amount + more.amount, length.unit)
    lengths = rebuilt(run).task.lengths
    return Duration(lengths.total_updates + lengths.updates(more), "up")


def _difference(run: Run, before: Recipe, recipe: Recipe, update: int, *, records: bool) -> str:
    """Return how the extended training differs from one that was as long from the start; empty: in nothing.

    `records`: compare the validations, too, not only the weights.
    """
    old, new = rebuilt(run, before), rebuilt(run, recipe)
    if new.task.lengths.total_updates <= update:
        raise UserError(
            f"train.length = {recipe.train.length} ends at update {new.task.lengths.total_updates}, but {run.path} has "
            f"made {update}: choose a longer one"
        )
    changed = next((u for u in range(update) if old.state.schedule.lr(u) != new.state.schedule.lr(u)), None)
    if changed is not None:
        return (
            f"the {recipe.schedule.name} schedule depends on the length: from update {changed} on, a training that was "
            "as long from the start would have had other learning rates, and other weights"
        )
    valid_every = new.task.lengths.updates(recipe.valid.every)
    if not valid_every or update % valid_every:
        seen = "a validation at the old end, which a longer training would not have had"
        if new.state.schedule.observes_validation:
            return f"the plateau schedule has seen {seen}"
        if records:
            return f"{run.path} has {seen}"
    return ""


def _fill(new: Run, run: Run, recipe: Recipe, found: Checkpoint) -> None:
    new.recipe_file.write_text(to_yaml(recipe.tree()), encoding="utf-8")
    for name in (run.environment_file.name, run.metrics_file.name):
        if (run.path / name).is_file():
            shutil.copyfile(run.path / name, new.path / name)
    for folder in (run.tensorboard.name, *own_code.PLACES.values(), own_code.OBJECTS, observer_code.COPIES):
        if (run.path / folder).is_dir():
            shutil.copytree(run.path / folder, new.path / folder)
    state = {**found.state, "recipe_sha256": recipe.sha256(), "extends": str(run.path.resolve())}
    if "recipe" in found.state:
        state["recipe"] = recipe.tree()
    text = json.dumps(state, indent=1).encode()
    new.checkpoints.mkdir()
    write(new.checkpoints, Snapshot(found.update, found.weights, found.optimiser, found.average, text))
    write_json(new.summary_file, {**run.summary(), "state": "interrupted", "recipe_sha256": recipe.sha256()})
