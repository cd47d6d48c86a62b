"""Recipes that have changed since a checkpoint was written: which keys differ, and which of them may.

A checkpoint holds the resolved recipe of the training that wrote it. `recipe.yaml` can be edited, and so can the file
that a restarted launch reads: continued with another recipe, a run would be that of no recipe at all.
"""

import json
from collections.abc import Mapping
from typing import Any

from podium.errors import UserError
from podium.recipe.loading import Recipe, recipe_from_tree
from podium.runs.folder import Run
from podium.runs.own_code import PLACES
from podium.training.stop_request import resume_continues
from podium.ui.console import warn
from podium.workloads.registry import is_own_file

#: sections, and keys, that say how a training is carried out, not what is learnt: a run may continue with others
CARRIED_BY = ("parallel", "launch", "log")
ALSO = (
    "train.time_limit",
    "checkpoint.every",
    "checkpoint.keep",
    "precision.trap",
    "engine.memory_check",
    "engine.audit",
)
_MAX_SHOWN = 5


def may_change(key: str) -> bool:
    """Return whether a run may continue with another value of this key, without asking."""
    return key.partition(".")[0] in CARRIED_BY or key in ALSO


def changed_keys(recipe: Recipe, state: Mapping[str, Any]) -> list[str]:
    """Return the keys in which `recipe` differs from that of a checkpoint's `state`, as `key was A, is B`."""
    if "recipe" not in state:  # written before recipes were part of checkpoints
        same = state.get("recipe_sha256") in (None, recipe.sha256())
        return [] if same else ["keys that its checkpoints do not name"]
    if not isinstance(state["recipe"], dict):
        raise UserError("the state of the checkpoint is damaged: recipe does not hold what it should")
    now = _leaves(recipe.tree())
    try:
        before = _leaves(recipe_from_tree(state["recipe"], where="the recipe of the checkpoint").tree())
    except UserError:  # from a version with other keys
        before = _leaves(state["recipe"])
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and not may_change(key)]
    for part in PLACES:
        name = f"{part}.name"
        if name in keys and all(is_own_file(str(json.loads(side.get(name, '""')))) for side in (before, now)):
            keys.remove(name)  # a copy of the file, or the file moved: `own_code` compares what is in it
    return [f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}" for key in keys]


def check_changes(run: Run, recipe: Recipe, state: Mapping[str, Any], *, accept: bool, again: bool) -> None:
    """Raise UserError that names the keys in which `recipe` differs from that of a checkpoint; only warn of them where
    the user accepts that. `again`: the launcher has restarted the instances, which read their recipe anew."""
    changed = changed_keys(recipe, state)
    if not changed:
        return
    what = f"the recipe has changed since update {state['update']} was saved: {_shown(changed)}"
    if accept:
        warn(f"{what}; the weights are no longer those of one recipe")
        return
    advice = "undo that, or continue with it nevertheless: --accept-changes"
    raise UserError(f"{what}; {f'{resume_continues(run.path)} with that of the run' if again else advice}")


def _shown(changed: list[str]) -> str:
    """Return the changes in one line, the first of them if they are many."""
    more = [f"and {len(changed) - _MAX_SHOWN} more"] if len(changed) > _MAX_SHOWN else []
    return "; ".join([*changed[:_MAX_SHOWN], *more])


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.dumps(value, default=str)
    return leaves
