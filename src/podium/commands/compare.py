"""`podium runs` and `podium compare`: runs in the terminal, as tables, JSON or CSV."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.recipe.differences import differing_keys, written
from podium.report.differing import environment_of
from podium.report.page import Comparison
from podium.report.reading import RunFacts, find_runs
from podium.report.solution import less_is_better
from podium.report.tables import energy_text, seconds_text, short_names
from podium.runs.folder import Run
from podium.ui.console import number, out, show_table, warn
from podium.ui.table import Table
from podium.ui.visible import visible

#: by what runs can be sorted, and the fact of a row that it is
SORTS = {"name": "run", "state": "state", "best": "best", "rate": "samples_per_second", "age": "age_s"}
#: so many runs are compared in columns; more have a row each
_COLUMNS, _MAX_KEYS = 4, 3
_MAX_VALUE = 40


def list_runs(folder: Path | None, metric: str, sort: str, form: str) -> None:
    """Print the runs below a folder with their state, best metric, rate and age."""
    if sort not in SORTS:
        raise UserError(f"--sort {sort[:80]}: expected one of {', '.join(SORTS)}")
    root = folder or (Path("runs") if Path("runs").is_dir() else Path())
    rows = [_facts(run, root, metric.removeprefix("valid/")) for run in find_runs([root])]
    key = SORTS[sort]
    down = sort == "rate" or (sort == "best" and not less_is_better(metric))
    known = [row for row in rows if row[key] is not None]
    known.sort(key=lambda row: row[key], reverse=down)
    rows = known + [row for row in rows if row[key] is None]
    if form == "json":
        print(json.dumps(rows, indent=1))
        return
    if form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return
    cells = [
        [
            row["run"],
            row["state"],
            _number(row["best"]),
            _number(row["samples_per_second"]),
            f"{row['updates']:,}/{row['total_updates']:,}" if row["total_updates"] else "–",
            age_text(row["age_s"]),
        ]
        for row in rows
    ]
    name = metric if "/" in metric else f"valid/{metric}"
    columns = ["run", "state", f"best {visible(name)}", "samples/s", "updates", "age"]
    show_table(Table("", columns, cells, f"{len(rows)} run{'' if len(rows) == 1 else 's'} in {visible(str(root))}"))
    for row in rows:
        if row["problem"]:
            warn(row["problem"])


def _facts(run: Run, root: Path, metric: str) -> dict[str, Any]:
    """Return what the summary and the environment say of a run; its records and its recipe are not read."""
    path = run.path.relative_to(root) if run.path.is_relative_to(root) else run.path
    row: dict[str, Any] = {"run": visible(str(path if path != Path() else run.path)), "state": "damaged", "best": None}
    row |= dict.fromkeys(("best_update", "samples_per_second", "updates", "total_updates", "seconds", "started"))
    row |= {"age_s": None, "problem": ""}
    try:
        summary, environment = run.summary(), run.environment()
        best = (summary.get("valid") or {}).get("best") or {}
        row |= {
            "state": run.state(),
            "best": _finite(best.get(metric)),
            "best_update": best.get("update"),
            "samples_per_second": _finite(summary.get("samples_per_second")) or None,
            "updates": summary.get("updates"),
            "total_updates": summary.get("total_updates"),
            "seconds": _finite((summary.get("seconds") or {}).get("total")),
            "started": environment.get("started"),
        }
    except UserError as error:
        row["problem"] = str(error)
    if row["started"]:
        age = datetime.now().astimezone() - datetime.fromisoformat(row["started"]).astimezone()
        row["age_s"] = round(age.total_seconds())
    return row


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def age_text(seconds: float | None) -> str:
    """Return how long ago something was, in one unit: 40s, 12m, 5h, 9d."""
    if seconds is None:
        return "–"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def compare_runs(comparison: Comparison, form: str) -> None:
    """Print runs beside each other: results, costs, and the keys of recipe and environment in which they differ."""
    runs = comparison.runs
    if form == "json":
        print(json.dumps([_tree(comparison, facts) for facts in runs], indent=1))
        return
    if len(runs) <= _COLUMNS:
        show_table(_in_columns(comparison))
    else:
        show_table(_in_rows(comparison))
    if said := _same_weights(runs):
        out.print(said, soft_wrap=True, markup=False)


def _tree(comparison: Comparison, facts: RunFacts) -> dict[str, Any]:
    best = comparison.best(facts)
    return {
        "run": facts.name,
        "path": str(facts.run.path),
        "state": facts.state,
        "metric": comparison.metric,
        "best": best[0] if best else None,
        "best_update": best[1] if best else None,
        "samples_per_second": facts.rate,
        "seconds": facts.seconds,
        "devices": facts.num_devices,
        "energy_j": facts.energy_j,
        "weights_sha256": facts.summary.get("weights_sha256"),
        "recipe": {key: facts.recipe.get(key) for key in comparison.keys},
    }


def _in_columns(comparison: Comparison) -> Table:
    """Return a table with a column for each run."""
    runs = comparison.runs
    rows = [["state", *(facts.state for facts in runs)]]
    if comparison.metric is not None:
        rows.append([f"best {visible(comparison.metric)}", *(_best_text(comparison, facts) for facts in runs)])
    for name in _last_metrics(runs):
        values = [((facts.summary.get("valid") or {}).get("last") or {}).get(name) for facts in runs]
        rows.append([f"last valid/{visible(name)}", *(_number(_finite(value)) for value in values)])
    rows += [
        ["updates", *(f"{facts.summary.get('updates', 0):,}" for facts in runs)],
        ["samples/s", *(_number(facts.rate) for facts in runs)],
        ["time", *("–" if facts.seconds is None else seconds_text(facts.seconds) for facts in runs)],
        ["cores or devices", *(str(facts.num_devices) for facts in runs)],
        ["energy", *(energy_text(facts.energy_j) for facts in runs)],
        ["weights", *((facts.summary.get("weights_sha256") or "–")[:12] for facts in runs)],
    ]
    keys = differing_keys([facts.recipe for facts in runs])
    rows += [[visible(key), *(_value(facts, key) for facts in runs)] for key in keys]
    alone = [dict(environment_of([facts])) for facts in runs]
    for name in dict.fromkeys(name for one in alone for name in one):
        texts = [one.get(name, "unknown") for one in alone]
        if len({*texts}) > 1:
            rows.append([name, *map(_cut, texts)])
    return Table("", ["", *(facts.name for facts in runs)], rows)


def _in_rows(comparison: Comparison) -> Table:
    """Return a table with a row for each run, the best first."""
    keys = comparison.keys[:_MAX_KEYS]
    rows = [
        [
            facts.name,
            facts.state,
            *(_value(facts, key) for key in keys),
            _best_text(comparison, facts),
            _number(facts.rate),
            "–" if facts.seconds is None else seconds_text(facts.seconds),
        ]
        for facts in comparison.ranked()
    ]
    left = len(comparison.keys) - len(keys)
    more = f"{left} more key{'' if left == 1 else 's'} differ: podium report, or --json" if left > 0 else ""
    best = f"best {visible(comparison.metric)}" if comparison.metric else "best"
    return Table("", ["run", "state", *short_names(keys), best, "samples/s", "time"], rows, more)


def _value(facts: RunFacts, key: str) -> str:
    return _cut(visible(written(facts.recipe[key])) if key in facts.recipe else "–")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _best_text(comparison: Comparison, facts: RunFacts) -> str:
    best = comparison.best(facts)
    return "–" if best is None else number(best[0])


def _last_metrics(runs: Sequence[RunFacts]) -> list[str]:
    return list(dict.fromkeys(name for facts in runs for name in (facts.summary.get("valid") or {}).get("last") or {}))


def _same_weights(runs: Sequence[RunFacts]) -> str:
    """Return which runs have ended with the same weights to the bit."""
    found: dict[str, list[str]] = {}
    for facts in runs:
        if digest := facts.summary.get("weights_sha256"):
            found.setdefault(digest, []).append(facts.name)
    if len(found) == 1 and len(runs) > 1 and len(next(iter(found.values()))) == len(runs):
        return "the weights of all are the same to the bit"
    same = [names for names in found.values() if len(names) > 1]
    return "; ".join(f"the weights of {', '.join(names)} are the same to the bit" for names in same)
