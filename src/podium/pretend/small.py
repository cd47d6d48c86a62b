"""The small form of a recipe: the same replicas, stages, order and learning rates, with little of everything else.

A workload says itself how its model is made small and what stands in for files that are not here
(`Section.made_small`, `Section.stand_in`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podium.engine.state import Lengths
from podium.recipe.durations import Duration
from podium.recipe.loading import Recipe, recipe_with
from podium.recipe.section import Section

#: samples in a micro-batch: the statistics of batch norm over fewer make gradients overflow
_MICRO_BATCH = 4
#: micro-batches of a replica that is not cut into stages
_ACCUMULATION = 2
_VALID_MICRO, _VALID_SAMPLES = 4, 16
#: updates that are made, and the one whose validation is the only one
NUM_UPDATES, VALIDATED_AFTER = 3, 2


def with_stand_in(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with random samples in the place of files that are not here, and what was replaced, or
    nothing."""
    data = recipe.workload.data
    path = getattr(data, "path", None)
    if (path is not None and Path(path).expanduser().exists()) or _is_generated(data):
        return recipe, ""
    keys = data.stand_in()
    source = f"workload.data.source = {getattr(data, 'source', '')} without a path"
    missing = f"{path} is not here" if path is not None else source
    return (recipe_with(recipe, _dotted(keys, "workload.data.")), missing) if keys else (recipe, "")


def small_accumulation(recipe: Recipe) -> int:
    """Return the micro-batches of a small replica: enough for a pipeline to be full."""
    enough = _ACCUMULATION if recipe.parallel.num_stages == 1 else recipe.parallel.num_stages + 2
    return min(recipe.batch.num_accumulation, enough)


def small_recipe(recipe: Recipe, lengths: Lengths, lr: float) -> Recipe:
    """Return a recipe that trains the same way on little: `lengths` and the rate `lr` are those of the pod."""
    model, data = recipe.workload.model, recipe.workload.data
    generated = _is_generated(data)
    keys: dict[str, Any] = dict(_durations(recipe, lengths))
    keys |= _dotted(model.made_small(generated=generated), "workload.model.")
    keys |= _dotted(data.made_small(generated=generated), "workload.data.")
    keys |= {
        "workload.init_from": None,
        "batch.micro": min(recipe.batch.micro_batch, _MICRO_BATCH),
        "batch.accumulation": small_accumulation(recipe),
        "batch.scaling": "weak",
        "optim.lr": lr,
        "optim.lr_exponent": None,
        "optim.scale": "none",
        "optim.base_batch": None,
        "optim.groups": [_scaled(group.model_dump(mode="json"), recipe.optim.lr) for group in recipe.optim.groups],
        # An automatic one would begin with more updates that overflow than are made here.
        "precision.loss_scale": 1.0 if recipe.precision.loss_scale == "auto" else recipe.precision.loss_scale,
        "train.time_limit": None,
        "valid.every": f"{VALIDATED_AFTER}up",
        "valid.micro": min(recipe.valid.micro, _VALID_MICRO),
        "valid.max_samples": _VALID_SAMPLES,
        "checkpoint.every": "1up",
        "checkpoint.keep": NUM_UPDATES + 1,
        "engine.device": "cpu",
        "engine.compile": False,
        "engine.graph": False,
        "engine.threads": 1,
        "engine.tune": "off",
        "engine.updates_per_call": 1,
        "log.report": False,
        "log.tensorboard": False,
        "log.wandb": "off",
        "log.mlflow": "off",
        "log.trackio": "off",
        "log.observers": [],
    }
    return recipe_with(recipe, keys)


def _scaled(group: dict[str, Any], lr: float | None) -> dict[str, Any]:
    """Return a group of `optim.groups` whose rate is a multiple of the others', which has the same effect."""
    if group["lr"] is None or lr is None:
        return group
    return {**group, "lr": None, "lr_scale": group["lr"] / lr}


def _is_generated(data: Any) -> bool:
    return getattr(data, "source", None) == "generated"


def _dotted(keys: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in keys.items()}


def _durations(section: Section, lengths: Lengths, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every duration of the recipe in updates: epochs of other data, and samples, would be other updates."""
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Duration):
            yield key, f"{lengths.updates(value)}up"
        elif isinstance(value, list) and value and all(isinstance(one, Duration) for one in value):
            yield key, [f"{lengths.updates(one)}up" for one in value]
        elif isinstance(value, Section) and prefix != "workload.":
            yield from _durations(value, lengths, f"{key}.")
