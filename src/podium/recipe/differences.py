"""Resolved recipes beside each other: their keys as one flat mapping, and which of them differ. Loads no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which flat recipes differ, those first that say what is learnt."""
    keys: dict[str, None] = {}
    for recipe in recipes:
        keys |= dict.fromkeys(recipe)
    found = [key for key in keys if len({written(recipe.get(key)) for recipe in recipes}) > 1]
    return sorted(found, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))


#: keys that people look for first
_FIRST = ("workload.name", "optim.name", "optim.lr", "batch.replicas", "batch.micro", "batch.global", "train.length")


def written(value: Any) -> str:
    """Return a value of a recipe as a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
