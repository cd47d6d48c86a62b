"""`podium.train`: a recipe trained from Python, in this process or by several instances."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from podium.api.run import Run
from podium.api.session import SessionStop, is_interactive, run_podium, session_kept
from podium.errors import Interrupted, UserError
from podium.recipe.loading import Recipe, load_recipe, recipe_from_tree, to_yaml
from podium.runs.folder import Run as Folder
from podium.runs.folder import check_free, next_free_folder
from podium.topology import build_topology
from podium.train import train as train_recipe
from podium.ui import console
from podium.workloads.own.fitted import Given, given
from podium.workloads.registry import stop_imported_script


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    out: str | Path | None = None,
    instances: int = 1,
) -> Run:
    """Train a recipe (a shipped name, a .yaml file or a mapping) and return its run.

    `overrides`: values by dotted key, as in {"optim.lr": 1e-3}, or as on the command line. `out`: the new run folder,
    by default the next free one in `runs`. With several `instances` other processes train, and this one waits.
    """
    stop_imported_script()
    check_instances(instances)
    name = str(recipe) if isinstance(recipe, str | Path) else "recipe"
    folder = Path(out) if out is not None else next_free_folder(Path("runs"), Path(name).stem)
    check_free(folder)
    written = [f"{key}={_yaml(value)}" for key, value in overrides.items()] if isinstance(overrides, Mapping) else None
    changes = list(overrides) if written is None else written
    with session_kept():
        if isinstance(recipe, Mapping):
            whole = load_tree(recipe, changes)
            path, holder = None, tempfile.TemporaryDirectory(prefix="podium-recipe-")
        else:
            whole = load_recipe(name, changes)
            path, holder = name, None
        if instances == 1:
            return run_here(whole, folder)
        with holder or nullcontext() as made:
            if path is None:
                path = str(Path(str(made)) / "recipe.yaml")
                Path(path).write_text(to_yaml(whole.tree()), encoding="utf-8")
                changes = []
            return run_elsewhere(["train", path, *changes, "--out", str(folder)], folder, instances)


def load_tree(tree: Mapping[str, Any], changes: list[str]) -> Recipe:
    """Return the recipe of a mapping with overrides; a `base` is not followed."""
    recipe = recipe_from_tree(dict(tree), "recipe")
    if not changes:
        return recipe
    with tempfile.TemporaryDirectory(prefix="podium-recipe-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(to_yaml(recipe.tree()), encoding="utf-8")
        return load_recipe(str(path), changes)


def run_here(recipe: Recipe, folder: Path, objects: Given | None = None) -> Run:
    """Train in this process; in a notebook a run that was interrupted is returned, elsewhere Interrupted is raised."""
    if recipe.parallel.num_stages > 1:
        raise UserError(
            f"parallel.stages: give instances={recipe.parallel.num_stages}, one for each stage, or a multiple"
        )
    stop, topology = SessionStop(), build_topology(recipe.batch.num_replicas)
    with given(objects) if objects is not None else nullcontext(), interruptions_told(objects is not None):
        train_recipe(recipe, folder, topology, stop=stop)
    return Run(folder, objects)


def run_elsewhere(arguments: list[str], folder: Path, instances: int, objects: Given | None = None) -> Run:
    """Train by several instances, each a process of its own."""
    with interruptions_told(objects is not None):
        run_podium([*arguments, "--instances", str(instances)])
    return Run(folder, objects)


@contextmanager
def interruptions_told(fitted: bool) -> Iterator[None]:
    """Tell a person in a notebook that the run was interrupted, and go on; a script that was stopped must not."""
    try:
        yield
    except Interrupted as interrupted:
        # The command that continues a recipe lacks what podium.fit was given.
        said, _, advice = str(interrupted).partition("; `podium resume")
        text = f"{said}; podium.fit(…, out=…, resume=True) continues" if fitted and advice else str(interrupted)
        if not is_interactive():
            raise Interrupted(text) from None
        console.warn(text)


def check_instances(instances: Any) -> None:
    if not isinstance(instances, int) or isinstance(instances, bool) or instances < 1:
        raise UserError(f"instances = {instances!r}: expected a whole number, 1 or more")


def _yaml(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, default=str)


def is_complete(folder: Path) -> bool:
    """Return whether a run has ended as it should."""
    return Folder(folder).summary().get("state") == "done"
