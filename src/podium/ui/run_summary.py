"""The table at the end of a run, from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

from podium.ui.console import number
from podium.ui.table import Table


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """Return metrics, rate and where the time went; the state is that of the summary."""
    valid, seconds = summary["valid"], summary["seconds"]
    rows = [[f"validation {name}", _with_best(name, value, valid["best"])] for name, value in valid["last"].items()]
    averaged = summary.get("average", {})
    rows += [
        [f"validation {name}, averaged weights", number(value)] for name, value in averaged.items() if name != "weights"
    ]
    rows += [
        ["updates", f"{summary['updates']:,} of {summary['total_updates']:,}"],
        ["samples/s", number(summary["samples_per_second"])],
        ["processor use", f"{summary['cpu_percent']:.0f} %"],
        ["weights", (summary.get("weights_sha256") or "–")[:16]],
    ]
    spent = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in seconds.items() if value >= 0.05)
    return Table(f"{title}: {summary['state']}", ["", ""], rows, spent)


def _with_best(name: str, last: float, best: Mapping[str, Any]) -> str:
    """Return the last value, with that of the best validation where it was another one."""
    if name not in best or best[name] == last:
        return number(last)
    return f"{number(last)} (best {number(best[name])} at update {best['update']:,})"
