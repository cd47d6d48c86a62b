"""The curves of runs for a page: every metric over updates and seconds, thinned to what a screen shows.

A bucket of updates keeps the record with the least and the one with the greatest value of each metric, so that no spike
is lost. Epochs and samples are multiples of updates, and are worked out in the page.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from podium.report.reading import Column, RunFacts
from podium.ui.page import short

#: numbers in all curves of a page together, and the most and fewest records of one run that are shown of a metric
_BUDGET, _MOST, _FEWEST = 180_000, 1600, 24
#: larger or smaller than this cannot be drawn
_LARGEST = 1e30
_SECONDS = "time/total_s"


def curves_of(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return for each run `epoch` and `samples` of one update, and `parts`: metrics that share updates and seconds."""
    num_lines = sum(len(_metrics(facts)) + 2 for facts in runs)
    most = max(_FEWEST, min(_MOST, _BUDGET // max(1, num_lines)))
    return [_curves_of(facts, most) for facts in runs]


def _curves_of(facts: RunFacts, most: int) -> dict[str, Any]:
    metrics = _metrics(facts)
    update, seconds = facts.columns.get("update", np.empty(0)), _drawable(facts, _SECONDS)
    parts = []
    for split in (True, False):  # validations are few, and have records of their own
        columns = {name: _drawable(facts, name) for name in metrics if name.startswith("valid/") is split}
        if not columns:
            continue
        there = np.flatnonzero(~np.all(np.isnan(np.stack(list(columns.values()))), axis=0))
        columns = {name: values[there] for name, values in columns.items()}
        kept = kept_records(list(columns.values()), len(there), most)
        parts.append(
            {
                "update": [int(update[there[at]]) for at in kept],
                "seconds": [short(float(seconds[there[at]]), 6) for at in kept],
                "metrics": {name: [short(float(values[at])) for at in kept] for name, values in columns.items()},
            }
        )
    each = {name: _each_update(facts, name) for name in ("epoch", "samples")}
    return {**each, "parts": parts}


def _each_update(facts: RunFacts, name: str) -> float | int | None:
    """Return how many epochs or samples an update has."""
    if not facts.num_records or not facts.columns["update"][-1]:
        return None
    return short(float(_drawable(facts, name)[-1] / facts.columns["update"][-1]), 9)


def kept_records(columns: Sequence[Column], num_records: int, most: int) -> list[int]:
    """Return which records to show, `most` of them at the utmost: the first, the last, and extremes in between."""
    if num_records <= most:
        return list(range(num_records))
    num_buckets = max(2, (most - 2) // (2 * max(1, len(columns))))
    kept = {0, num_records - 1}
    for bucket in np.array_split(np.arange(num_records), num_buckets):
        for values in columns:
            here = values[bucket]
            if not np.isnan(here).all():
                kept |= {int(bucket[np.nanargmin(here)]), int(bucket[np.nanargmax(here)])}
    return sorted(kept)


def _metrics(facts: RunFacts) -> list[str]:
    """Return the names of all curves; what is no curve that anybody looks at is left out."""
    return [name for name in facts.metrics if name != _SECONDS and not name.startswith(("topology/", "bits/"))]


def _drawable(facts: RunFacts, name: str) -> Column:
    """Return the numbers of a metric that an axis can show, NaN for others."""
    if name not in facts.columns:
        return np.full(facts.num_records, np.nan)
    values = facts.columns[name]
    with np.errstate(invalid="ignore"):
        values = np.where(np.abs(values) < _LARGEST, values, np.nan)
        return np.where(np.abs(values) < 1 / _LARGEST, 0.0, values)
