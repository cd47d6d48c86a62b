"""`workload.init_from`: where the recipe is silent, the model is that of the folder whose weights it starts from.

What is written later wins, as everywhere: sizes that a base recipe has set give way to those of a folder that is named
after it. Sizes that are written with the folder, or after it, have to agree with it: loading the weights finds out.
"""

import json
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.recipe.section import Section, sections_of

CONFIG = "config.json"
#: a `config.json` has a few kilobytes
_MAX_BYTES = 1 << 24
Tree = dict[str, Any]


def drop_inherited_sizes(schema: type[Section], inherited: Tree, written: Tree, origins: dict[str, str]) -> None:
    """Drop the keys of an inherited model that a folder of weights, named later, decides."""
    model = _below(inherited, "workload", "model")
    decided = _decided(schema, written) if model else None
    if decided is not None:
        for key in (*decided[0], "size"):
            model.pop(key, None)
            origins.pop(f"workload.model.{key}", None)


def take_sizes_of_folder(schema: type[Section], tree: Tree, origins: dict[str, str]) -> None:
    """Fill in what the recipe does not say about the model from the folder whose weights it starts from."""
    decided = _decided(schema, tree)
    if decided is None:
        return
    keys, dropouts, where = decided
    model = tree["workload"].setdefault("model", {})
    if not isinstance(model, dict):
        return
    numbers = ("layers", "hidden", "heads")
    if "size" not in model:
        model["size"] = "custom"
    elif model["size"] != "custom":
        keys = {key: value for key, value in keys.items() if key not in numbers}
    for key, value in {**keys, **{key: share for key, share in dropouts.items() if not isinstance(share, str)}}.items():
        if key not in model:
            model[key] = value
            origins[f"workload.model.{key}"] = where


def _decided(schema: type[Section], tree: Tree) -> tuple[Tree, Tree, str] | None:
    """Return the keys of `workload.model` that a folder decides, its dropouts, and its file; None without a folder."""
    start = _below(tree, "workload").get("init_from")
    folder = start.get("path") if isinstance(start, dict) and not start.get("rename") else start
    of_folder = getattr(_model_section(schema), "of_huggingface", None)
    if not isinstance(folder, str) or of_folder is None:
        return None
    path = Path(folder).expanduser() / CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        config = json.loads(content) if len(content) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return None  # told when the weights are loaded; a run that resumes needs no folder
    try:
        keys, _, dropouts, _ = of_folder(config)
    except UserError as error:
        raise UserError(f"workload.init_from = {folder}: {error}") from None
    return keys, dropouts, str(path)


def _model_section(schema: type[Section]) -> type[Section] | None:
    for kind in sections_of(schema.model_fields["workload"]):
        return next(iter(sections_of(kind.model_fields["model"])), None)
    return None


def _below(tree: Tree, *keys: str) -> Tree:
    found: Any = tree
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
