"""The definition of a study: `study.yaml`, or a recipe with `key=v1,v2` on the command line. Loads no torch.

What is suggested, kept and compared is a function of this definition alone; how many runs go at once, and how often a
crashed one is tried again, is not part of it.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from podium.errors import UserError
from podium.recipe.durations import Duration, Seconds
from podium.recipe.loading import Recipe, load_recipe, read_yaml, recipe_path, validated
from podium.recipe.section import Section

#: the most runs of a study, and the most combinations whose recipes are all read before anything starts
MAX_RUNS = 100_000
_MAX_CHECKED = 2_000
#: metrics that depend on the machine and its load, not on the recipe alone
_OF_THE_MACHINE = (
    "time/",
    "device/",
    "system/",
    "seconds",
    "train/samples_per_second",
    "samples_per_second",
    "cpu_percent",
)

Value = Any


class RangeSection(Section):
    """Numbers between two ends, both included; whole ones where both ends are whole."""

    from_: float | int = Field(alias="from")
    to: float | int
    log: bool = False
    step: float | int | None = None

    @property
    def whole(self) -> bool:
        """Return whether the numbers are whole."""
        ends = (self.from_, self.to, self.step if self.step is not None else 1)
        return all(isinstance(end, int) for end in ends)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.from_ >= self.to:
            raise ValueError(f"from {self.from_:g} to {self.to:g}: expected a larger number at the end")
        if self.log and self.from_ <= 0:
            raise ValueError(f"from {self.from_:g}: expected a number above 0 with log")
        if self.step is not None and (self.log or self.step <= 0):
            raise ValueError("step: expected a number above 0, and no log beside it")
        return self


class BudgetSection(Section):
    """When a study ends although there is more to try."""

    #: trainings in all, seeds counted
    runs: PositiveInt | None = None
    #: of working on it, all commands counted; what goes on then is saved
    time: Seconds | None = None


class ConstraintSection(Section):
    """What a run must keep to, to be the best one: a metric as recorded, or a number of its summary."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_side(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"constraints: {self.metric}: expected one of at_most and at_least")
        return self

    def violation(self, value: float) -> float:
        """Return by how much a value is on the wrong side; 0 or less: it is not."""
        return value - self.at_most if self.at_most is not None else (self.at_least or 0.0) - value


class HalvingSection(Section):
    """Successive halving: all of a generation train until `first`, the best part of them until `factor` times that."""

    first: Duration
    factor: Annotated[int, Field(ge=2)] = 3

    @model_validator(mode="after")
    def _later_than_the_start(self) -> Self:
        if not self.first:
            raise ValueError("halving.first: expected a duration longer than 0")
        return self

    def rung(self, index: int) -> Duration:
        """Return where the runs of a generation are compared for the `index`-th time."""
        return Duration(self.first.amount * self.factor**index, self.first.unit)


Range = list[Value] | RangeSection


class StudySection(Section):
    """Everything about a study that its results depend on."""

    #: a shipped name, or a file
    recipe: str
    #: keys that are the same for all runs
    set: dict[str, Value] = Field(default_factory=dict)
    #: keys to vary, with a list of values or (random, tpe) a range each
    values: dict[str, Range] = Field(default_factory=dict)
    method: Literal["grid", "random", "tpe"] = "grid"
    #: how often each choice of values is trained, from different seeds; or the seeds themselves
    seeds: PositiveInt | list[Annotated[int, Field(ge=0)]] = 1
    metric: str = "valid/loss"
    #: which values are better; may be left out for a loss
    mode: Literal["min", "max"] | None = None
    #: the best value that a run has recorded, or the last
    take: Literal["best", "last"] = "best"
    #: the study ends after the generation that reaches it
    target: float | None = None
    budget: BudgetSection = BudgetSection()
    constraints: list[ConstraintSection] = Field(default_factory=list)
    halving: HalvingSection | None = None
    #: choices of values that are suggested, compared and judged together
    generation: PositiveInt = 8
    #: tpe: choices drawn at random before it learns
    startup: PositiveInt = 10
    #: of what is drawn
    seed: Annotated[int, Field(ge=0)] = 1
    #: threads per replica of every run, unless the recipe or a value says so: part of the numerics
    threads: PositiveInt = 1
    #: of every run; none: the minimum
    instances: PositiveInt | None = None

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        for key, given in self.values.items():
            if isinstance(given, RangeSection):
                if self.method == "grid":
                    raise ValueError(f"values.{key} is a range: a grid needs a list of values")
                continue
            if not given:
                raise ValueError(f"values.{key} is empty: expected at least one value")
            shown = [json.dumps(value, sort_keys=True, default=str) for value in given]
            twice = next((text for text in shown if shown.count(text) > 1), None)
            if twice is not None:
                raise ValueError(f"values.{key} has {twice[:80]} twice")
        both = sorted({*self.values} & {*self.set})
        if both:
            raise ValueError(f"{both[0]} is both in set and in values: leave it out of one")
        if isinstance(self.seeds, list) and (not self.seeds or len(set(self.seeds)) < len(self.seeds)):
            raise ValueError(f"seeds = {self.seeds}: expected different seeds, one at least")
        if "seed" in self.values and self.seeds != 1:
            raise ValueError("seed is varied by values and by seeds: leave one of them out")
        if self.mode is None and not self.metric.endswith("loss"):
            raise ValueError(f"is less or more of {self.metric} better? say so with mode: min or max")
        if self.method == "grid" and not self.values and self.num_seeds == 1:
            raise ValueError("nothing varies: give a key several values, such as optim.lr=1e-3,2e-3, or several seeds")
        if self.method != "grid" and not self.values:
            raise ValueError(f"values is empty: {self.method} needs keys to vary, with a list or a range each")
        if self.method != "grid" and self.budget.runs is None:
            raise ValueError(f"budget.runs is missing: {self.method} never ends without it")
        if self.budget.runs is not None and self.budget.runs < self.num_seeds:
            raise ValueError(f"budget.runs = {self.budget.runs}: expected {self.num_seeds} at least, one for each seed")
        size = min(self.grid_size if self.method == "grid" else MAX_RUNS, self.budget.runs or MAX_RUNS + 1)
        if size * (self.num_seeds if self.method == "grid" else 1) > MAX_RUNS:
            raise ValueError(f"a study has at most {MAX_RUNS:,} runs, and this one has more")
        return self

    @property
    def num_seeds(self) -> int:
        """Return how often each choice of values is trained."""
        return self.seeds if isinstance(self.seeds, int) else len(self.seeds)

    @property
    def less_is_better(self) -> bool:
        """Return whether the study looks for a small value of its metric."""
        return self.mode != "max"

    @property
    def grid_size(self) -> int:
        """Return how many choices of values a grid has."""
        return math.prod(len(given) for given in self.values.values() if isinstance(given, list))

    @property
    def num_points(self) -> int:
        """Return how many choices of values there are to try."""
        most = None if self.budget.runs is None else self.budget.runs // self.num_seeds
        if self.method == "grid":
            return self.grid_size if most is None else min(self.grid_size, most)
        assert most is not None
        return most

    @property
    def by_generations(self) -> bool:
        """Return whether a generation begins only when the one before has ended."""
        return self.method == "tpe" or self.halving is not None or self.target is not None

    def grid(self) -> Iterator[dict[str, Value]]:
        """Yield the choices of a grid; the key that was given last changes fastest."""
        lists = [given for given in self.values.values() if isinstance(given, list)]
        for chosen in itertools.product(*lists):
            yield dict(zip(self.values, chosen, strict=True))

    def better(self, value: float, than: float) -> bool:
        """Return whether one value of the metric is better than another."""
        return value < than if self.less_is_better else value > than

    def reaches_target(self, value: float) -> bool:
        """Return whether a value is as good as the target; never where there is none."""
        return self.target is not None and not self.better(self.target, value)

    def run_seeds(self, first: int) -> list[int]:
        """Return the seeds of the runs of one choice, given that of the recipe."""
        return list(range(first, first + self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)

    def timed_metrics(self) -> list[str]:
        """Return the metrics it decides by that depend on the machine, and would differ when it is repeated."""
        named = [self.metric, *(constraint.metric for constraint in self.constraints)]
        return [name for name in named if name.startswith(_OF_THE_MACHINE)]

    def tree(self) -> dict[str, Any]:
        """Return the resolved tree, ready for YAML; reading it again gives an equal definition."""
        tree: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return tree


def is_study_file(path: Path) -> bool:
    """Return whether a YAML file defines a study, and not a recipe."""
    return "recipe" in read_yaml(path)


def study_from_tree(tree: Mapping[str, Any], where: str, folder: Path | None = None) -> StudySection:
    """Return the study of a tree; raise UserError with its mistakes. Recipe files are looked for from `folder`."""
    study = validated(StudySection, dict(tree), {}, where)
    if study.recipe.endswith((".yaml", ".yml")):
        path = recipe_path(str((folder or Path()) / study.recipe))
        study = study.model_copy(update={"recipe": str(path.resolve())})
    return study


def override(key: str, value: Value) -> str:
    """Return a key and its value as the command line has it."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def base_overrides(study: StudySection) -> list[str]:
    """Return what all runs have on top of the recipe."""
    return [override(key, value) for key, value in study.set.items()]


def run_recipe(study: StudySection, values: Mapping[str, Value], seed: int | None) -> Recipe:
    """Return the recipe of one run. Its threads are settled here, so that they do not depend on the cores it gets."""
    words = [*base_overrides(study), *(override(key, value) for key, value in values.items())]
    if seed is not None:
        words.append(f"seed={seed}")
    recipe = load_recipe(study.recipe, words)
    if recipe.engine.threads == "auto":
        recipe = load_recipe(study.recipe, [*words, f"engine.threads={study.threads}"])
    return recipe


def check_values(study: StudySection) -> Recipe:
    """Return the recipe without what varies; raise UserError where a key or a value cannot be used, as far as that
    shows before anything is trained."""
    base = load_recipe(study.recipe, base_overrides(study))
    if study.method == "grid" and study.grid_size <= _MAX_CHECKED:
        for values in study.grid():
            run_recipe(study, values, None)
        return base
    ends = {key: given if isinstance(given, list) else [given.from_, given.to] for key, given in study.values.items()}
    first = {key: values[0] for key, values in ends.items()}
    for key, tried in ends.items():
        for value in tried:
            run_recipe(study, {**first, key: value}, None)
    return base


def check_at_once(text: str) -> int | None:
    """Return how many runs may go at once; None: as many as the machine has room for."""
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UserError(f"--at-once {text[:80]}: expected a number from 1 to 4096, or auto")
    return int(text)
