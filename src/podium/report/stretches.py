"""The stretches of runs over which their topology stayed the same: from which update on, how many instances and hosts.

Records may name the topology (`topology/instances`, `topology/hosts`); a run whose records do not has one stretch, that
of its summary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from podium.report.reading import RunFacts
from podium.ui.table import Table

_COUNTS = ("hosts", "instances", "replicas", "stages")
_MAX_ROWS = 60


@dataclass(frozen=True)
class Stretch:
    """Updates that were made with the same topology."""

    first: int
    last: int
    counts: tuple[int | None, ...]


def run_stretches(facts: RunFacts) -> list[Stretch]:
    """Return the stretches of one run in order; none where it has not begun."""
    topology = facts.summary.get("topology") or {}
    ends = tuple(value if isinstance(value := topology.get(name), int) else None for name in _COUNTS)
    found: list[Stretch] = []
    for at in range(facts.num_records):
        update = int(facts.columns["update"][at])
        counts = tuple(_recorded(facts, name, at, end) for name, end in zip(_COUNTS, ends, strict=True))
        if found and found[-1].counts == counts:
            found[-1] = Stretch(found[-1].first, update, counts)
        else:
            found.append(Stretch(found[-1].last + 1 if found else 1, update, counts))
    if not found and topology:
        found = [Stretch(1, int(facts.summary.get("updates") or 0), ends)]
    return found


def _recorded(facts: RunFacts, name: str, at: int, otherwise: int | None) -> int | None:
    column = facts.columns.get(f"topology/{name}")
    return otherwise if column is None or not math.isfinite(column[at]) else int(column[at])


def stretches_of(runs: Sequence[RunFacts]) -> Table | None:
    """Return the table of stretches: those of one run, or how many runs had which."""
    all_stretches = [(facts, run_stretches(facts)) for facts in runs]
    if not any(stretches for _, stretches in all_stretches):
        return None
    if len(runs) == 1 or any(len(stretches) > 1 for _, stretches in all_stretches):
        rows = [
            [*([facts.name] if len(runs) > 1 else []), f"{one.first:,} to {one.last:,}", *map(_text, one.counts)]
            for facts, stretches in all_stretches
            for one in stretches
        ]
        more = f"{len(rows) - _MAX_ROWS} more rows" if len(rows) > _MAX_ROWS else ""
        columns = [*(["run"] if len(runs) > 1 else []), "updates", *_COUNTS]
        return Table("Topology", columns, rows[:_MAX_ROWS], more)
    found: dict[tuple[int | None, ...], int] = {}
    for _, stretches in all_stretches:
        for one in stretches:
            found[one.counts] = found.get(one.counts, 0) + 1
    rows = [[f"{count} of {len(runs)}", *map(_text, counts)] for counts, count in found.items()]
    return Table("Topology", ["runs", *_COUNTS], rows[:_MAX_ROWS])


def _text(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"
