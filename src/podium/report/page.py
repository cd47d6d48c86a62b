"""`report.html`: one self-contained page about one run, or about many. Everything it shows is read from run folders.

Text and tables are written here; curves, the table of runs and what follows its filter are drawn by
`templates/report.js` from the page's data.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.recipe.differences import differing_keys, written
from podium.recipe.loading import to_yaml
from podium.report.curves import curves_of
from podium.report.differing import differences_table, environment_of
from podium.report.pictures import predictions_of, side_by_side
from podium.report.reading import RunFacts, metric_names, values_of
from podium.report.scaling import Scaling, scaling_of
from podium.report.solution import Group, Solution, Target, groups_of, less_is_better, recommendation, solve
from podium.report.stretches import stretches_of
from podium.report.tables import cards_of_run, cards_of_runs, phases_of, scaling_table, solution_table
from podium.runs.folder import replace_file
from podium.ui.page import render_page, short
from podium.ui.visible import visible

#: keys whose differences are not worth a column
_NOT_VARIED = ("log.", "launch.", "checkpoint.keep", "checkpoint.every", "batch.global")


@dataclass(frozen=True)
class StudyView:
    """What a study knows beyond its runs."""

    keys: list[str]
    importances: Mapping[str, float] = field(default_factory=dict)
    #: facts for the head of the page
    note: str = ""
    #: by name of a run, its state and its values in the study
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Runs, and what they are compared by."""

    runs: list[RunFacts]
    #: recipe keys in which they differ
    keys: list[str]
    #: the metric that ranks them; None where they record none
    metric: str | None
    less_is_better: bool
    target: Target | None
    study: StudyView | None = None

    @property
    def solutions(self) -> list[Solution]:
        return [solve(facts, self.target) for facts in self.runs] if self.target is not None else []

    def groups(self) -> list[Group]:
        """Return the runs by what they have in common beside their seeds, with how they came to the target."""
        return groups_of(self.solutions, self.keys)

    def best(self, facts: RunFacts) -> tuple[float, int] | None:
        """Return the best value of the metric and the update it is of."""
        if self.metric is None:
            return None
        values = [(value, int(facts.columns["update"][at])) for at, value in values_of(facts, self.metric)]
        if not values:
            return None
        return min(values) if self.less_is_better else max(values, key=lambda one: (one[0], -one[1]))

    def ranked(self) -> list[RunFacts]:
        """Return the runs, the best first, those without a value last."""
        sign = 1 if self.less_is_better else -1
        known = {id(facts): best for facts in self.runs if (best := self.best(facts)) is not None}
        return sorted(
            self.runs, key=lambda facts: (id(facts) not in known, sign * known.get(id(facts), (0.0, 0))[0], facts.name)
        )


def compare(runs: list[RunFacts], target: Target | None = None, study: StudyView | None = None,
            metric: str | None = None, less: bool | None = None) -> Comparison:  # fmt: skip
    """Return the comparison of runs by a metric: that of the target, else that by which they choose checkpoints."""
    known = [name for name in metric_names(runs) if name.startswith(("valid/", "train/"))]
    chosen = str(runs[0].recipe.get("checkpoint.best.metric") or "valid/loss")
    metric = metric or (target.metric if target else chosen if chosen in known else next(iter(known), None))
    if less is None:
        less = target.less_is_better if target and target.metric == metric else _less(metric, runs)
    keys = [key for key in differing_keys([facts.recipe for facts in runs]) if not key.startswith(_NOT_VARIED)]
    if study is not None:
        keys = [*study.keys, *(key for key in keys if key not in study.keys)]
    return Comparison(runs, keys, metric, less, target, study)


def _less(metric: str | None, runs: Sequence[RunFacts]) -> bool:
    try:
        return metric is None or less_is_better(metric, runs)
    except UserError:
        return True


def write_report(comparison: Comparison, path: Path, title: str, command: Sequence[str] = ()) -> None:
    """Write the page in place of an earlier one."""
    replace_file(path, report_html(comparison, title, command).encode("utf-8", errors="backslashreplace"))


def report_html(comparison: Comparison, title: str, command: Sequence[str] = ()) -> str:
    """Return the page."""
    runs, single = comparison.runs, len(comparison.runs) == 1
    groups = comparison.groups()
    scalings = scaling_of(runs, comparison.keys)
    first = runs[0]
    pictures, tables = predictions_of(first) if single else ([], [])
    beside, num_pictured = ({}, 0) if single else side_by_side(comparison.ranked())
    words = first.run.command() if single and first.environment else list(command)
    return render_page(
        "report.html.j2",
        "podium.report",
        title=visible(title),
        data=_data(comparison, scalings),
        scripts=["report.js", "runs.js"],
        single=single,
        state=first.state if single else "",
        facts=_facts_line(comparison),
        command=[visible(shlex.quote(word)) for word in words],
        cards=cards_of_run(first) if single else cards_of_runs(comparison),
        target=comparison.target,
        recommendation=recommendation(groups, comparison.target) if comparison.target is not None else "",
        solution=solution_table(groups, comparison.keys) if comparison.target is not None else None,
        scalings=[scaling_table(scaling) for scaling in scalings],
        phases=phases_of(first.summary.get("seconds") or {}) if single else [],
        pictures=pictures,
        beside=beside,
        num_pictured=num_pictured,
        tables=tables,
        differences=None if single else differences_table(runs),
        stretches=stretches_of(runs),
        importances=[(visible(key), 100 * float(share)) for key, share in _importances(comparison)],
        recipe=visible_recipe(first),
        environment=environment_of(runs),
    )


def visible_recipe(facts: RunFacts) -> str:
    """Return the recipe of a run as YAML."""
    return to_yaml(facts.run.tree())


def _importances(comparison: Comparison) -> list[tuple[str, float]]:
    return sorted((comparison.study.importances if comparison.study else {}).items(), key=lambda one: -one[1])


def _facts_line(comparison: Comparison) -> str:
    runs = comparison.runs
    started = [facts.started for facts in runs if facts.started is not None]
    if len(runs) == 1:
        summary = runs[0].summary
        weights, recipe = ((summary.get(f"{what}_sha256") or "–")[:16] for what in ("weights", "recipe"))
        when = f"started {_date(started[0])} · " if started else ""
        return visible(f"{when}weights {weights} · recipe {recipe}")
    parts = [f"{len(runs)} runs"]
    if comparison.study is not None and comparison.study.note:
        parts.append(comparison.study.note)
    if started:
        parts.append(f"started {_date(min(started))} to {_date(max(started))}")
    return visible(" · ".join([*parts, f"written {_date(datetime.now())}"]))


def _date(when: datetime) -> str:
    """Return a date and time as people read it, to the minute."""
    return when.strftime("%Y-%m-%d %H:%M")


# --- the data of the page's scripts ----------------------------------------------------------------------------------


def _data(comparison: Comparison, scalings: Sequence[Scaling]) -> dict[str, Any]:
    solutions = {id(solution.facts): solution for solution in comparison.solutions}
    states = comparison.study.states if comparison.study is not None else {}
    return {
        "metric": comparison.metric,
        "less": comparison.less_is_better,
        "keys": [visible(key) for key in comparison.keys],
        "target": str(comparison.target) if comparison.target is not None else None,
        "runs": [
            _row(comparison, facts, states.get(facts.name), solutions.get(id(facts))) for facts in comparison.runs
        ],
        "curves": curves_of(comparison.runs),
        "scalings": [
            {
                "name": visible(scaling.name),
                "device": scaling.device_name,
                "rows": [[row.devices, row.rate, row.efficiency] for row in scaling.rows],
            }
            for scaling in scalings
        ],
    }


def _row(comparison: Comparison, facts: RunFacts, state: str | None, solution: Solution | None) -> dict[str, Any]:
    best = comparison.best(facts)
    last = values_of(facts, comparison.metric)[-1:] if comparison.metric is not None else []
    seconds = facts.seconds
    row: dict[str, Any] = {
        "name": facts.name,
        "state": state or facts.state,
        "values": [_shown(facts.recipe.get(key)) for key in comparison.keys],
        "best": None if best is None else short(best[0]),
        "best_update": None if best is None else best[1],
        "last": short(last[0][1]) if last else None,
        "updates": facts.summary.get("updates"),
        "rate": None if facts.rate is None else short(facts.rate),
        "seconds": None if seconds is None else short(seconds),
        "devices": facts.num_devices,
        "busy": facts.summary.get("cpu_percent"),
        "started": "" if facts.started is None else _date(facts.started),
        "phases": {
            name: short(float(value), 4)
            for name, value in (facts.summary.get("seconds") or {}).items()
            if name != "total" and value
        },
        "energy": None if facts.energy_j is None else short(facts.energy_j),
    }
    if solution is not None:
        row["reached"] = None if solution.seconds is None else short(solution.seconds)
        row["reached_at"] = solution.update
    return row


def _shown(value: Any) -> Any:
    """Return a value of a recipe for a cell: numbers as they are, anything else as text of a bounded length."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = "" if value is None else visible(written(value))
    return text if len(text) <= 80 else f"{text[:79]}…"
