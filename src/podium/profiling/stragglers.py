"""Updates of several real instances: who is slow, who waits, and how much of the exchange hides behind computing."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.training.build import threads_per_replica
from podium.tune.measure import MeasuringProcesses

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class InstanceTimes:
    """Mean milliseconds of an update of one instance."""

    index: int
    update_ms: float
    #: of it, waiting for the others
    waits_ms: float
    #: the slowest update of twenty
    slow_ms: float
    #: sums with others, whether this instance waited for them or not; None where its form does not know
    exchange_ms: float | None

    @property
    def own_ms(self) -> float:
        return self.update_ms - self.waits_ms

    @property
    def hidden(self) -> float | None:
        """The share of the exchange that went on behind the backward pass."""
        if self.exchange_ms is None or self.exchange_ms <= 0:
            return None
        return max(0.0, 1 - self.waits_ms / self.exchange_ms)


@dataclass(frozen=True)
class InstancesProfile:
    """What several instances measured together."""

    samples_per_second: float
    instances: Sequence[InstanceTimes]

    @property
    def straggler(self) -> InstanceTimes:
        """The instance that takes longest itself: the others wait for it."""
        return max(self.instances, key=lambda one: one.own_ms)

    def sentence(self) -> str:
        slowest, fastest = self.straggler, min(self.instances, key=lambda one: one.own_ms)
        if slowest.own_ms < 1.05 * fastest.own_ms:
            return "all instances take about as long: nobody waits for a certain one"
        more = slowest.own_ms / fastest.own_ms - 1
        waiting = "the other waits" if len(self.instances) == 2 else "the others wait"
        return (
            f"{waiting} for instance {slowest.index}: its own work takes {more:.0%} longer than that of "
            f"instance {fastest.index}"
        )


def profile_instances(
    name: str, overrides: Sequence[str], recipe: Recipe, count: int, seconds: float
) -> InstancesProfile:
    """Run the recipe on `count` instances of this host for about `seconds`."""
    processes = MeasuringProcesses(count, name, overrides)
    try:
        keys = {"engine.threads": threads_per_replica(recipe, None)}
        found = processes.details(keys, seconds, _TIMEOUT_S)
    finally:
        processes.close()
    if found is None:
        raise UserError(
            f"updates of {count} instances could not be measured: `podium train --instances {count}` says why"
        )
    rows = []
    for index, answer in enumerate(found):
        updates = [1e3 * took for took in answer["updates"]]
        exchanges = answer["exchanges"]
        rows.append(
            InstanceTimes(
                index,
                statistics.fmean(updates),
                1e3 * answer["waits"] / len(updates),
                sorted(updates)[int(0.95 * (len(updates) - 1))],
                None if exchanges is None else 1e3 * exchanges / len(updates),
            )
        )
    return InstancesProfile(min(answer["rate"] for answer in found), rows)
