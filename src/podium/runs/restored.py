"""A run's training, built again with the weights of one of its checkpoints. Used by what comes after training."""

from podium.checkpoints import reading
from podium.checkpoints.reading import Checkpoint
from podium.errors import UserError
from podium.recipe.loading import Recipe, recipe_with
from podium.runs.folder import Run
from podium.training.build import Training, build_training
from podium.ui.console import warn

#: keys that say how a model is trained fast; without them it is plain torch in single precision, on one device
_PLAIN = {
    "engine.kernels": "off",
    "engine.layout": "default",
    "engine.compile": False,
    "parallel.stages": 1,
    "parallel.recompute": False,
    "parallel.shard": "none",
    "precision.mode": "32.32",
    "precision.trap": False,
}


def restored(run: Run, which: str, recipe: Recipe | None = None) -> tuple[Training, Checkpoint]:
    """Return the training with the weights of a checkpoint: `last`, `best`, `average`, or the number of an update."""
    found = find_checkpoint(run, which)
    training = rebuilt(run, recipe)
    found.restore(training.state.model)
    return training, found


def rebuilt(run: Run, recipe: Recipe | None = None) -> Training:
    """Return the training with initial weights and as many threads as the run had."""
    return build_training(recipe or run.recipe(), threads=run.environment().get("threads_per_replica"))


def plain_recipe(run: Run) -> Recipe:
    """Return the run's recipe with a model of torch's own operators alone, which other programs understand."""
    return recipe_with(run.recipe(), _PLAIN)


def find_checkpoint(run: Run, which: str) -> Checkpoint:
    """Read and verify a checkpoint of the run; raise UserError where there is none of that name."""
    if which == "last":
        found = reading.load_latest(run.checkpoints, warn)
        if found is None:
            raise UserError(f"{run.path} has no checkpoint yet")
        return found
    if which == "average":
        paths = reading.checkpoint_paths(run.average)
        if not paths:
            raise UserError(f"{run.path} has no averaged weights: `podium average {run.path}` writes them")
        return reading.load(paths[-1])
    if which == "best":
        update = run.summary().get("valid", {}).get("best", {}).get("update")
        if update is None:
            raise UserError(f"{run.path} has no validated checkpoint yet")
    elif which.isdecimal():
        update = int(which)
    else:
        raise UserError(f"--checkpoint {which}: expected last, best, average or the number of an update")
    return reading.load(reading.path_of(run.checkpoints, update))
