"""Saving the state of a training between two updates. Called by `train.py`."""

from podium.checkpoints.writing import Saver
from podium.training.build import Training
from podium.training.clock import Clock
from podium.training.validation import try_weights


def save(saver: Saver, training: Training, clock: Clock) -> None:
    """Have the state copied and written, by the instances that take part in it."""
    recipe, state, parallelism = training.recipe, training.state, training.parallelism
    if not parallelism.saves:
        return
    with clock.phase("checkpoint"), parallelism.whole_model() as model:
        # The last update's loss was that of the weights before it. The new weights are tried on one sample, as they
        # may replace the last good checkpoint.
        if parallelism.data_group.index == 0:
            try_weights(training, model)
        saver.save(
            state.progress.update,
            model,
            state.optimiser,
            {"recipe_sha256": recipe.sha256(), "recipe": recipe.tree(), "seconds": clock.seconds(), **state.state()},
            state.progress.best_update,
            state.average.tensors if state.average is not None else None,
            parallelism.holders,
        )


def newest_is_missing(training: Training, saver: Saver, save_every: int) -> bool:
    """Return whether a checkpoint was due that is not on the disk; raise CheckpointLost if that of the best validation
    is not, which cannot be written any more."""
    progress, written = training.state.progress, saver.written()
    best = progress.best_update
    if training.recipe.checkpoint.best and best is not None and best not in written:
        raise CheckpointLost(f"the checkpoint of update {best}, the best one, was lost before it was on the disk")
    due = progress.update - progress.update % save_every if save_every else 0
    return due > max(written, default=0)


class CheckpointLost(Exception):
    """What the run has to keep is neither on the disk nor in memory."""
