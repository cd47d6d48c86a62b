"""A definition against that of an existing study: what may grow, and what would mix results that do not belong
together."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from podium.errors import UserError
from podium.recipe.durations import Duration
from podium.runs.recipe_changes import may_change
from podium.study.definition import RangeSection, StudySection
from podium.study.folder import StudyFolder

#: how a study is carried out, when it ends: they change no result that is there
_FREE = ("instances", "target", "budget")
#: how results are read: free as long as nothing was suggested or pruned by them
_READING = ("metric", "mode", "take", "constraints")
_MAX_SHOWN = 4


def check_same_study(folder: StudyFolder, new: StudySection, base: Mapping[str, Any], workload: str) -> None:
    """Raise UserError that says what differs, unless `new` is the study in the folder or one that it may grow to."""
    old = folder.definition()
    problems = [*_differences(old, new), *_recipe_differences(folder.base(), base, old)]
    if folder.facts().workload not in (None, workload):
        problems.append("the code of the workload has changed")
    if problems:
        more = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise UserError(
            f"{folder.path} holds another study: {'; '.join([*problems[:_MAX_SHOWN], *more])}; choose another folder "
            "with --out, or go on with what it was started with"
        )


def _differences(old: StudySection, new: StudySection) -> Iterator[str]:
    decided = old.method == "tpe" or old.halving is not None
    for key in StudySection.model_fields:
        before, now = getattr(old, key), getattr(new, key)
        if before == now or key in _FREE or key == "set" or (key in _READING and not decided):
            continue
        if key == "values":
            yield from _value_differences(old, new)
        elif key == "seeds":
            if decided or not _has_grown(old, new):
                yield f"seeds was {before}, is {now}"
        else:
            yield f"{key} was {_text(before)}, is {_text(now)}"
    if new.num_points < old.num_points:
        yield f"it has {old.num_points} choices of values, and would have {new.num_points}"
    elif new.num_points > old.num_points and old.halving is not None and old.num_points % old.generation:
        yield (
            f"its last generation has {old.num_points % old.generation} of {old.generation} choices, which were "
            "compared without those that would be added"
        )


def _value_differences(old: StudySection, new: StudySection) -> Iterator[str]:
    for key in {**old.values, **new.values}:
        before, now = old.values.get(key), new.values.get(key)
        if before == now:
            continue
        if (
            before is None
            or now is None
            or old.method != "grid"
            or isinstance(before, RangeSection)
            or isinstance(now, RangeSection)
        ):
            yield f"{key} was {_text(before)}, is {_text(now)}"
        else:
            gone = [value for value in before if value not in now]
            if gone:
                yield f"{key} had {_text(gone[0])}, and has it no more"


def _has_grown(old: StudySection, new: StudySection) -> bool:
    if isinstance(old.seeds, int) and isinstance(new.seeds, int):
        return new.seeds >= old.seeds
    return isinstance(old.seeds, list) and isinstance(new.seeds, list) and {*old.seeds} <= {*new.seeds}


def _recipe_differences(before: Mapping[str, Any], now: Mapping[str, Any], study: StudySection) -> Iterator[str]:
    """Yield the keys of the recipe that differ, as a file that was edited or other fixed keys make them."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    for key in differing_keys(before, now):
        if may_change(key):
            continue
        if key == "train.length":
            yield from _length_difference(json.loads(old[key]), json.loads(new[key]), study)
        else:
            yield f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two resolved recipes differ."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def _length_difference(before: str, now: str, study: StudySection) -> Iterator[str]:
    """Yield a problem unless runs can be grown from one length to the other."""
    if study.method == "tpe" or study.halving is not None:
        yield f"train.length was {before}, is {now}, and what was tried was chosen by the shorter runs"
        return
    old, new = Duration.parse(before), Duration.parse(now)
    if old.unit != new.unit or new.amount < old.amount:
        yield f"train.length was {before}, is {now}: runs can only grow, in the same unit"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def _text(value: Any) -> str:
    if isinstance(value, RangeSection):
        value = value.model_dump(by_alias=True, exclude_defaults=True)
    elif hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif isinstance(value, list) and value and hasattr(value[0], "model_dump"):
        value = [one.model_dump(exclude_defaults=True) for one in value]
    text = "not varied" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
