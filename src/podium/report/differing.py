"""Recipes and environments of runs beside each other: what they have in common, and what not."""

from collections.abc import Mapping, Sequence
from typing import Any

from podium.recipe.differences import differing_keys, written
from podium.report.reading import RunFacts
from podium.ui.table import Table
from podium.ui.visible import visible

#: so many runs have a column each
_COLUMNS, _MAX_VALUES, _LONG = 6, 12, 90
#: not shown: long, or shown elsewhere
_NOT_SHOWN = ("torch_build", "command", "started", "code", "log_code")


def differences_table(runs: Sequence[RunFacts]) -> Table | None:
    """Return the recipe keys in which runs differ: one column for each of a few runs, else values with their counts."""
    keys = differing_keys([facts.recipe for facts in runs])
    if not keys:
        return None
    if len(runs) <= _COLUMNS:
        rows = [[visible(key), *(_cell(facts.recipe, key) for facts in runs)] for key in keys]
        return Table("Recipe differences", ["key", *(facts.name for facts in runs)], rows)
    rows = [[visible(key), _counts([_cell(facts.recipe, key) for facts in runs])] for key in keys]
    return Table("Recipe differences", ["key", "values (runs)"], rows)


def environment_of(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    """Return what the runs were computed on: one value where all agree, else the values with their counts."""
    names: dict[str, None] = {}
    for facts in runs:
        names |= dict.fromkeys(name for name in facts.environment if name not in _NOT_SHOWN)
    rows = []
    for name in names:
        values = [_environment_text(facts.environment.get(name)) for facts in runs]
        rows.append((visible(name.replace("_", " ")), values[0] if len({*values}) == 1 else _counts(values)))
    return rows


def _cell(recipe: Mapping[str, Any], key: str) -> str:
    text = visible(written(recipe[key])) if key in recipe else "–"
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _environment_text(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return visible(", ".join(f"{key} {text}" for key, text in value.items())) or "none"
    if isinstance(value, list):
        return visible(", ".join(map(str, value))) or "none"
    return visible(str(value))


def _counts(values: Sequence[str]) -> str:
    """Return different values with how often they occur, the most frequent first."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    shown = [f"{value} ({count})" for value, count in ordered[:_MAX_VALUES]]
    more = [f"{len(ordered) - _MAX_VALUES} more"] if len(ordered) > _MAX_VALUES else []
    return ", ".join([*shown, *more])
