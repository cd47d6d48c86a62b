"""What the loop does between updates besides saving: validate, average, check that losses are finite."""

import math

from torch import nn

from podium.engine.losses import Sums
from podium.engine.state import metric_of
from podium.errors import TrainingFailed, UserError
from podium.training.build import Training
from podium.training.evaluate import evaluate
from podium.training.recalibration import recalibrated

_KEPT = "earlier checkpoints are kept: a smaller optim.lr or an optim.clip_norm may help"


def validate(training: Training) -> bool:
    """Validate the weights and their average, and inform the schedule; return whether this is the best validation so
    far."""
    state = training.state
    with training.parallelism.whole_model() as model:
        means = _validated(training, model)
        if state.average is not None and state.average.num_taken:
            with state.average.in_place_of(model):
                state.progress.average_last = _validated(training, model)
    state.schedule.observe(means["loss"], state.progress.update)
    return state.progress.take_valid(means, training.recipe.checkpoint.ranking, training.recipe.train.stop)


def check_metrics(training: Training) -> None:
    """Raise UserError if the recipe decides by metrics that the workload does not have, where one sample can tell."""
    recipe = training.recipe
    if recipe.train.stop is not None and training.task.lengths.updates(recipe.valid.every) == 0:
        raise UserError(
            f"train.stop needs validations to decide by, but valid.every = {recipe.valid.every} validates only after "
            "the last update"
        )
    chosen = {"checkpoint.best.metric": recipe.checkpoint.ranking, "train.stop.metric": recipe.train.stop}
    named = {key: section for key, section in chosen.items() if section is not None and section.name != "loss"}
    if not named or training.parallelism.pipeline_group is not None:
        return
    with training.parallelism.whole_model() as model:
        known = _evaluated(training, model, micro_batch=1, max_samples=1, together=False)
    if training.state.average is not None:
        known |= {f"average_{name}": value for name, value in known.items()}
    for key, section in named.items():
        metric_of(known, section, key)


def try_weights(training: Training, model: nn.Module) -> None:
    """Raise TrainingFailed unless the loss of one sample is finite; weights that overflow do so for any sample."""
    _evaluated(training, model, micro_batch=1, max_samples=1, together=False)


def check_finite(sums: Sums, update: int) -> None:
    """Raise TrainingFailed unless all losses up to `update` are finite."""
    for name, parts in sums.parts.items():
        if not all(math.isfinite(total) for total, _ in parts):
            raise TrainingFailed(f"the training {name} is not finite at or before update {update}; {_KEPT}")


def take_average(training: Training) -> None:
    """Add the weights to their average, where the recipe asks for one and it is due."""
    state, lengths, section = training.state, training.task.lengths, training.recipe.average
    if state.average is None:
        return
    update = state.progress.update
    since_start = update - lengths.updates(section.start)
    if since_start >= 0 and update > 0 and since_start % max(1, lengths.updates(section.every)) == 0:
        with training.parallelism.whole_model() as model:
            state.take_average(model)


def _validated(training: Training, model: nn.Module) -> dict[str, float]:
    section = training.recipe.valid
    with recalibrated(training, model, training.state.progress.update):
        return _evaluated(training, model, section.micro, section.max_samples)


def _evaluated(
    training: Training, model: nn.Module, micro_batch: int, max_samples: int | None, *, together: bool = True
) -> dict[str, float]:
    means = evaluate(
        model,
        training.task.workload,
        training.task.valid_source,
        micro_batch=micro_batch,
        device=training.placement.device,
        max_samples=max_samples,
        parallelism=training.parallelism,
        together=together,
    )
    # Unless evaluated together, only one instance of a pipeline has a loss.
    if "loss" in means and not math.isfinite(means["loss"]):
        update = training.state.progress.update
        raise TrainingFailed(f"the validation loss is not finite after update {update}; {_KEPT}")
    return means
