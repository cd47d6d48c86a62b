"""How the rate grows with the number of devices: throughput, its efficiency, and the ideal line."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from podium.recipe.differences import written
from podium.report.reading import RunFacts

#: keys that may differ between runs whose rates are compared: they do not change the work of a sample
_FREE = ("seed", "optim.", "schedule.", "train.", "valid.", "checkpoint.", "log.", "launch.", "average.")
#: what grows with the number of devices
_GROWS = ("batch.replicas", "batch.global", "batch.accumulation", "batch.scaling")


@dataclass(frozen=True)
class Scaled:
    """Runs of the same work on one number of devices."""

    devices: int
    #: samples per second: median, least, most
    rate: float
    least: float
    most: float
    num_runs: int
    #: of perfect scaling from the fewest devices, 1 for all of it
    efficiency: float


@dataclass(frozen=True)
class Scaling:
    """The same work on several numbers of devices."""

    name: str
    device_name: str
    rows: list[Scaled]


def scaling_of(runs: Sequence[RunFacts], keys: Sequence[str]) -> list[Scaling]:
    """Return how each kind of work scales, where it was done on more than one number of devices."""
    work = [key for key in keys if not key.startswith((*_FREE, *_GROWS))]
    found: dict[str, list[RunFacts]] = {}
    for facts in runs:
        if facts.rate is not None and facts.summary.get("topology"):
            identity = written([facts.device, *(facts.recipe.get(key) for key in work)])
            found.setdefault(identity, []).append(facts)
    scalings = []
    for group in found.values():
        counts = sorted({facts.num_devices for facts in group})
        if len(counts) > 1:
            name = ", ".join(f"{key} {written(group[0].recipe.get(key))}" for key in work)
            scalings.append(Scaling(name, group[0].device_name, _rows(group, counts)))
    return scalings


def _rows(group: Sequence[RunFacts], counts: Sequence[int]) -> list[Scaled]:
    rates = {count: sorted(facts.rate or 0.0 for facts in group if facts.num_devices == count) for count in counts}
    each = statistics.median(rates[counts[0]]) / counts[0]
    return [
        Scaled(
            count, statistics.median(found), found[0], found[-1], len(found), statistics.median(found) / count / each
        )
        for count, found in rates.items()
    ]
