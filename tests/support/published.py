"""Published numbers beside those of a recipe, key by key."""

from typing import Any

from podium.optim.lr_scaling import scaled_lr
from podium.optim.schedules import build_schedule
from podium.recipe.loading import Recipe, load_recipe


def differences(name: str, published: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (published, ours)} wherever the recipe called `name` has another value than published."""
    tree = load_recipe(name).tree()
    found = {}
    for dotted, expected in published.items():
        value: Any = tree
        for key in dotted.split("."):
            value = value[key]
        if value != expected:
            found[dotted] = (expected, value)
    return found


def peak_rate(recipe: Recipe) -> float:
    """Return the full learning rate of a recipe at its global batch."""
    optim = recipe.optim
    return scaled_lr(
        lr=optim.lr,
        lr_exponent=optim.lr_exponent,
        scale=optim.scale,
        base_batch=optim.base_batch,
        global_batch=recipe.batch.global_batch,
    )


def rates_of(recipe: Recipe, updates_per_epoch: int) -> list[float]:
    """Return the learning rate of every update, for a data set of so many updates in an epoch."""
    size = recipe.batch.global_batch
    total = recipe.train.length.updates(updates_per_epoch=updates_per_epoch, global_batch=size)
    schedule = build_schedule(recipe.schedule, peak_rate(recipe), total, updates_per_epoch, size)
    return [schedule.lr(update) for update in range(total)]
