"""`podium tune`, and how `podium train` uses what was measured before."""

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.engine.compile import has_compiler
from podium.errors import UserError
from podium.kernels.install import resolve_layout
from podium.machine.device import resolve_device
from podium.recipe.loading import Recipe, load_recipe, recipe_with, to_yaml
from podium.runs.folder import replace_file
from podium.topology import build_topology, usable_cores
from podium.training.build import build_training
from podium.tune.cache import Outcome, recall, remember
from podium.tune.space import KEYS, PRESERVING, Choice, choices, halve
from podium.ui import console
from podium.ui.table import Table

if TYPE_CHECKING:
    from podium.tune.measure import MeasuringProcesses

#: how long the search may take, not counting the final measurements
SEARCH_S = 60.0
_FIRST_VISIT_S = 0.4
_LAST_VISIT_S = 1.5
_FINAL_VISITS = 2
#: compilation is abandoned after this long; any other visit after the second
_COMPILE_S = 40.0
_VISIT_TIMEOUT_S = 120.0
#: a gain below this is noise
_MIN_GAIN = 1.05
_ROWS = 14


def tune(name: str, overrides: Sequence[str], write: Path | None, seconds: float = SEARCH_S) -> None:
    """Measure, print a table, remember the outcome; `write` also puts the fastest choice into a recipe file."""
    if write is not None and write.exists():
        raise UserError(f"{write} already exists: choose another name")
    recipe = load_recipe(name, overrides)
    found, rates, base, took_s = _measured(name, overrides, recipe, seconds)
    console.show_table(_table(name, rates, base, took_s))
    path = remember(recipe, resolve_device(recipe.engine.device), found)
    console.say(_outcome(name, found, path))
    if write is not None:
        _write_recipe(write, name, overrides, recipe, found)


def tuned(name: str, overrides: Sequence[str], recipe: Recipe, instances: str | None) -> tuple[list[str], str | None]:
    """Return the overrides and the number of instances to train with, given what was measured; say so when they change.

    Choices that change bits are made only where the recipe has `engine.tune_bits`.
    """
    if recipe.engine.tune == "off" or recipe.parallel.num_stages > 1:
        return list(overrides), instances
    device = resolve_device(recipe.engine.device)
    found = recall(recipe, device)
    if found is None:
        if recipe.engine.tune == "remembered":
            return list(overrides), instances
        found, *_ = _measured(name, overrides, recipe, SEARCH_S)
        remember(recipe, device, found)
    keys = dict(found.best if recipe.engine.tune_bits else found.preserving)
    count = keys.pop("instances", None)
    given = _given(recipe) if not recipe.engine.tune_bits else frozenset()
    keys = {key: value for key, value in keys.items() if key not in given}
    if instances is not None:
        count = None
    if keys or count:
        chosen = _listed(keys | ({"instances": count} if count else {}))
        console.say(f"using {chosen}, as tuned on {found.measured} (engine.tune=off ignores it)")
    more = [f"{key}={_yaml_value(value)}" for key, value in _complete(recipe, keys).items()]
    return [*overrides, *more], str(count) if count else instances


def _measured(
    name: str, overrides: Sequence[str], recipe: Recipe, seconds: float
) -> tuple[Outcome, dict[Choice, float], Choice, float]:
    began = time.monotonic()
    cores = len(usable_cores())
    device = resolve_device(recipe.engine.device)
    training = build_training(recipe, build_topology(recipe.batch.num_replicas))  # makes the data and finds mistakes
    base = Choice(
        layout=resolve_layout(recipe.engine.layout, device, recipe.precision.computes_in_half),
        compile=recipe.engine.compile,
        threads=training.placement.busy_threads,
        micro=recipe.batch.micro_batch,
        accumulation=recipe.batch.num_accumulation,
        replicas=recipe.batch.num_replicas,
        instances=1,
        prefetch=recipe.engine.prefetch,
    )
    search = _Search(name, overrides, seconds)
    try:
        with console.progress_display(what="tuning") as search.display:
            rates = halve(
                choices(base, cores, _given(recipe), recipe.blocks),
                base,
                search.rate,
                first_s=_FIRST_VISIT_S,
                time_left=search.left,
            )
            if base not in rates:
                raise UserError("the recipe itself could not be run; `podium train` says why")
            _refine(rates, base, search, _given(recipe), seconds)
    finally:
        search.close()
    same = _best([choice for choice in rates if choice.same_bits(base)], rates, base)
    best = _best(list(rates), rates, base)
    found = Outcome(
        measured=datetime.date.today().isoformat(),
        default_rate=rates[base],
        preserving_rate=rates[same],
        best_rate=rates[best],
        preserving={key: value for key, value in same.differing(base).items() if key in PRESERVING},
        best=best.differing(base),
    )
    return found, rates, base, time.monotonic() - began


class _Search:
    """Measuring processes by number of instances, started when first needed, and the time that is left."""

    def __init__(self, name: str, overrides: Sequence[str], seconds: float) -> None:
        self._name, self._overrides = name, overrides
        self._processes: dict[int, MeasuringProcesses] = {}
        self._began, self._seconds = time.monotonic(), seconds
        self.display: console.Display = console.NoDisplay()

    def left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def rate(self, choice: Choice, seconds: float, timeout_s: float = _VISIT_TIMEOUT_S) -> float | None:
        done = min(self._seconds, self._seconds - self.left())
        self.display.update(int(done), int(self._seconds), {"trying": _listed(_shown(choice))})
        group = self._processes.get(choice.instances)
        if group is None:
            from podium.tune.measure import MeasuringProcesses  # a training that only recalls does without

            group = self._processes[choice.instances] = MeasuringProcesses(
                choice.instances, self._name, self._overrides
            )
        found = group.rate(choice.keys(), seconds, timeout_s)
        if not group.ready:
            group.close()
            del self._processes[choice.instances]
        return found

    def close(self) -> None:
        for group in self._processes.values():
            group.close()


def _refine(rates: dict[Choice, float], base: Choice, search: _Search, given: frozenset[str], seconds: float) -> None:
    """Try compilation and prefetch on the best choices so far; measure all that may win again, in turns."""
    best, same = _best(list(rates), rates, base), _best([c for c in rates if c.same_bits(base)], rates, base)
    finalists = [base, *(choice for choice in dict.fromkeys((same, best)) if choice != base)]
    visit_s = min(_LAST_VISIT_S, seconds / 20)
    if "engine.prefetch" not in given:
        finalists += [replace(choice, prefetch=depth) for choice in dict.fromkeys((same, best)) for depth in (1, 4)]
    if "engine.compile" not in given and has_compiler():
        compiled = replace(best, compile=not best.compile)
        # the first visit compiles
        if search.rate(compiled, visit_s, timeout_s=min(_COMPILE_S, seconds)) is not None:
            finalists.append(compiled)
    for _ in range(_FINAL_VISITS):
        for choice in finalists:
            if (rate := search.rate(choice, visit_s)) is not None:
                rates[choice] = max(rate, rates.get(choice, 0.0))


def _best(among: Sequence[Choice], rates: Mapping[Choice, float], base: Choice) -> Choice:
    """Return the fastest, or the base where the difference may be noise."""
    fastest = max(among, key=lambda choice: rates[choice])
    return fastest if rates[fastest] >= _MIN_GAIN * rates[base] else base


def _given(recipe: Recipe) -> frozenset[str]:
    """Return the keys that the recipe or the command line sets: chosen by a person, so left alone."""
    return frozenset(f"engine.{key}" for key in recipe.engine.model_fields_set)


def _complete(recipe: Recipe, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return all batch sizes where one changes, so that none is derived from what was set before."""
    if not any(key.startswith("batch.") for key in keys):
        return dict(keys)
    batch = recipe.batch
    sizes = {"micro": batch.micro_batch, "accumulation": batch.num_accumulation, "replicas": batch.num_replicas}
    return {f"batch.{key}": value for key, value in sizes.items()} | {"batch.scaling": "weak"} | dict(keys)


# --- what is printed -----------------------------------------------------------------------------------------------


def _table(name: str, rates: Mapping[Choice, float], base: Choice, seconds: float) -> Table:
    ranked = sorted(rates, key=lambda choice: -rates[choice])
    shown = ranked[:_ROWS]
    shown += [choice for choice in (base,) if choice not in shown]
    rows = []
    for choice in shown:
        differing = choice.differing(base)
        rows.append(
            [
                _listed(differing) if differing else "the recipe unchanged",
                f"{rates[choice]:,.0f}",
                f"{rates[choice] / rates[base]:.2f}",
                "same" if choice.same_bits(base) else "different",
            ]
        )
    return Table(
        f"{name} on {len(usable_cores())} cores",
        ["change", "samples/s", "speed-up", "bits"],
        rows,
        f"{len(rates)} choices measured in {seconds:.0f} s"
        + (f", the best {len(shown)} shown" if len(shown) < len(rates) else ""),
    )


def _outcome(name: str, found: Outcome, path: Path) -> str:
    gain = found.preserving_rate / found.default_rate
    lines = [
        f"fastest with the same bits: {_listed(found.preserving)} ({gain:.2f} × as fast); training will use it"
        if found.preserving
        else "nothing with the same bits is faster: training will use the recipe unchanged"
    ]
    if found.best != found.preserving:
        gain = found.best_rate / found.default_rate
        lines.append(
            f"fastest with different bits: {_listed(found.best)} ({gain:.2f} × as fast); "
            f"used with engine.tune_bits=true, or write it to a recipe with `podium tune {name} --write my.yaml`"
        )
    return "\n".join([*lines, f"saved in {path}"])


def _shown(choice: Choice) -> dict[str, Any]:
    keys = choice.keys()
    return {**{key: keys[key] for key in KEYS.values()}, "instances": choice.instances}


def _listed(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_yaml_value(value)}" for key, value in keys.items())


def _yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_recipe(path: Path, name: str, overrides: Sequence[str], recipe: Recipe, found: Outcome) -> None:
    keys = {key: value for key, value in found.best.items() if key != "instances"}
    base = os.path.relpath(name, path.parent or ".") if name.endswith((".yaml", ".yml")) else name
    tree: dict[str, Any] = {"base": base}
    plain = load_recipe(name).tree()
    wanted = recipe_with(recipe, _complete(recipe, keys)).tree()
    tree.update(_differences(plain, wanted))
    instances = found.best.get("instances")
    command = f"podium train {path}" + (f" --instances {instances}" if instances else "")
    text = (
        f"# {name} with the settings that ran fastest on {len(usable_cores())} cores, measured on {found.measured}.\n"
        f"#\n#   {command}\n#\n"
        f"# {found.best_rate:,.0f} samples/s; {name} itself: {found.default_rate:,.0f}.\n{to_yaml(tree)}"
    )
    replace_file(path, text.encode())
    load_recipe(str(path))
    console.say(f"wrote {path}: {command}")


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if inner := _differences(before[key], value):
                found[key] = inner
        elif before.get(key) != value:
            found[key] = value
    return found
