"""`podium show`: a recipe with everything resolved, or that of a run with what has become of it.

Loads no torch, but to look for a device that a recipe names.
"""

from datetime import datetime
from pathlib import Path

from podium.errors import UserError
from podium.recipe.loading import load_recipe, to_yaml
from podium.runs.folder import Run
from podium.ui.console import warn
from podium.workloads.registry import is_own


def show(name: str, overrides: list[str]) -> None:
    """Print a recipe, or that of a run after a comment on its state, as YAML."""
    run = Run(Path(name))
    if not run.environment_file.is_file():
        recipe = load_recipe(name, overrides)
        print(to_yaml(recipe.tree()), end="", flush=True)
        _warn_of_missing_device(recipe.engine.device)
        return
    if overrides:
        raise UserError(f"{name} is a run, whose recipe is shown as it is: leave out {overrides[0]}")
    tree = run.tree()  # that of a user's workload is shown without running its code
    own = isinstance(tree.get("workload"), dict) and is_own(str(tree["workload"].get("name")))
    print(f"# {describe(run)}\n{to_yaml(tree if own else run.recipe().tree())}", end="")


def _warn_of_missing_device(name: str) -> None:
    if name not in ("auto", "cpu"):
        from podium.machine.device import resolve_device  # loads torch

        try:
            resolve_device(name)
        except UserError as error:
            warn(str(error))


def describe(run: Run) -> str:
    """Return where a run stands: its state, its updates, and when that was."""
    summary, state = run.summary(), run.state()
    if not summary:
        return f"{run.path}: {state}"
    updates, when = summary["updates"], summary.get("written")
    if state in ("running", "killed") and (records := run.records()):  # the summary is that of the start
        updates = max(updates, int(records[-1]["update"]))
        when = datetime.fromtimestamp(run.metrics_file.stat().st_mtime).isoformat()
    as_of = f", as of {datetime.fromisoformat(when):%Y-%m-%d %H:%M:%S}" if when else ""
    return f"{run.path}: {state} after update {updates:,} of {summary['total_updates']:,}{as_of}"
