"""`podium workloads`: what can be trained, and where it comes from. Loads no torch, and no code of others."""

import importlib.util
from pathlib import Path

from podium.ui.console import show_table
from podium.ui.table import Table
from podium.workloads.registry import WORKLOADS, announced


def list_workloads() -> None:
    """List the shipped workloads and those that installed packages announce."""
    rows = [[name, "Podium", _first_line(name)] for name in WORKLOADS]
    for name, point in announced().items():
        package = point.dist
        origin = f"{package.name} {package.version}" if package is not None else "an installed package"
        hidden = " (hidden by Podium's own of this name)" if name in WORKLOADS else ""
        rows.append([name, origin, f"{point.value}{hidden}"])
    note = "Your own: `workload.name: mine.py`, relative to the recipe; `podium new NAME` writes one to begin with"
    show_table(Table("", ["workload", "comes from", "what it is"], rows, note))


def _first_line(name: str) -> str:
    """Return the first line of a shipped workload's README that is text."""
    spec = importlib.util.find_spec(WORKLOADS[name].rpartition(".")[0])
    assert spec is not None
    assert spec.origin is not None
    lines = Path(spec.origin).with_name("README.md").read_text(encoding="utf-8").splitlines()
    text = next(line for line in lines if line and not line.startswith("#"))
    return text.partition(". ")[0].rstrip(".")
