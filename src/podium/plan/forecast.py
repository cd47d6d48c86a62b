"""From measured parts to a whole training on any number of instances and hosts, as intervals.

    update = passes and reduction on one host (measured), or their processor time where instances share cores
             + waiting for the slowest of all instances, beyond those of one host
             + reduction between hosts - what of it hides behind the last backward pass

What is not known exactly is drawn: how visits differed, what programs get of the network, how much overlaps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from podium.distributed.reduction.exchange import Exchange
from podium.plan.components import Components, HostTimes
from podium.plan.intervals import Interval
from podium.plan.network import Network, reduction_load
from podium.recipe.loading import Recipe
from podium.replica_tree import deal, spread, subtrees

Floats = NDArray[np.float64]

_DRAWS = 4000
#: a later run differs from the visits by this much at least, relative
_MIN_SPREAD = 0.05
#: where taking turns on a core was not measured: how much longer passes take that share caches
_CROWDED = (1.0, 1.3)
#: what a further doubling of instances adds to the processor time of an update beside its passes, against the last one
_FURTHER_DOUBLING = (0.7, 1.5)
#: of a pass, what is backward, where a reduction can hide
_BACKWARD = 2 / 3
#: what of the backward pass hides a reduction, at worst and at best: it takes processor time itself
_OVERLAP = (0.2, 0.9)
_MEMORY_SPREAD = 0.06


@dataclass(frozen=True)
class Shape:
    """How a training is spread, and how long it is."""

    num_replicas: int
    num_instances: int
    num_hosts: int
    micro_batch: int
    num_accumulation: int
    #: of the whole training; per epoch
    total_updates: int
    updates_per_epoch: int
    num_validations: int
    num_checkpoints: int

    @property
    def per_host(self) -> int:
        """Return the instances of the host that has most."""
        return -(-self.num_instances // self.num_hosts)

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.num_accumulation * self.num_replicas

    @property
    def num_passes(self) -> int:
        """Return the micro-batches in one update of the instance that has most."""
        return self.num_accumulation * -(-self.num_replicas // self.num_instances)


@dataclass(frozen=True)
class Forecast:
    """What a training will need."""

    shape: Shape
    update_s: Interval
    samples_per_second: Interval
    #: to the end of the training; None where there are too few samples for an epoch
    total_s: Interval | None
    device_hours: Interval | None
    #: of an update, what is communication between hosts and waiting for others
    communication: Interval
    memory_bytes: Interval | None

    def graded(self) -> dict[str, Interval]:
        """Return what a run can be compared with, by name."""
        found = {"samples_per_second": self.samples_per_second, "total_s": self.total_s, "memory": self.memory_bytes}
        return {name: interval for name, interval in found.items() if interval is not None}


def shape_of(recipe: Recipe, parts: Components, num_instances: int, num_hosts: int) -> Shape:
    """Return the shape of a recipe's training; its samples are those that were counted when it was measured."""
    batch = recipe.batch
    per_epoch = parts.num_samples // batch.global_batch
    total = valid = saves = 0
    if per_epoch:
        sizes = {"updates_per_epoch": per_epoch, "global_batch": batch.global_batch}
        total = recipe.train.length.updates(**sizes)
        every = (recipe.valid.every, recipe.checkpoint.every)
        counts = [duration.updates(**sizes, total_updates=total) for duration in every]
        valid, saves = (1 + (total - 1) // count if count else 1 for count in counts)
    return Shape(
        batch.num_replicas, num_instances, num_hosts, batch.micro_batch, batch.num_accumulation, total, per_epoch,
        valid, saves,
    )  # fmt: skip


def forecast(parts: Components, shape: Shape, network: Network | None, seed: int = 0) -> Forecast:
    """Predict a training; `network` may be None on one host."""
    rng = np.random.default_rng(seed)
    times, local_s = _on_host(parts, shape, rng)
    speed = np.exp(rng.standard_normal(_DRAWS) * max(_MIN_SPREAD, times.spread))
    local_s = local_s * speed
    waiting_s = local_s * parts.jitter * max(0.0, _slowest(shape.num_instances) - _slowest(shape.per_host))
    sent_s, hidden_s = np.zeros(_DRAWS), rng.uniform(*_OVERLAP, _DRAWS) * _BACKWARD * times.pass_s * speed
    if shape.num_hosts > 1:
        assert network is not None
        exchange = Exchange(shape.num_replicas, spread(shape.num_instances, shape.num_hosts))
        rounds, sent = reduction_load(parts.gradient_bytes, exchange)
        reached = rng.uniform(*network.reached, _DRAWS)
        sent_s = rounds * network.latency_s * rng.uniform(1.0, 2.0, _DRAWS) + sent / network.bytes_per_second / reached
    update_s = local_s + waiting_s + np.maximum(0.0, sent_s - hidden_s)
    alone = parts.times[1]
    # Alone, an instance would have a core for each of its threads; passes that share cores do not wait for others.
    shared = max(1.0, shape.per_host * parts.threads / parts.num_cores)
    total_s, rate = None, shape.global_batch / update_s
    if shape.total_updates:
        sharing = min(shape.num_instances, max(1, parts.num_valid_samples))
        valid_s = parts.valid_s * parts.num_valid_samples / sharing * shared * speed * shape.num_validations
        others = times.startup_s * shared + parts.save_s * shape.num_checkpoints
        warm_up_s = times.warm_up_s * shared
        total_s = update_s * shape.total_updates + valid_s + others + warm_up_s
        rate = shape.global_batch / (update_s + warm_up_s / shape.total_updates)
    memory = _memory(parts, shape, rng)
    # Visits of one instance and of several differed, too, and not in the same way.
    alone_speed = np.exp(rng.standard_normal(_DRAWS) * max(_MIN_SPREAD, alone.spread))
    alone_s = alone.seconds(shape.num_passes) * shared * (speed if shape.num_instances == 1 else alone_speed)
    return Forecast(
        shape,
        Interval.of(update_s),
        Interval.of(rate),
        None if total_s is None else Interval.of(total_s),
        None if total_s is None else Interval.of(total_s * shape.num_instances / 3600),
        Interval.of(np.clip(1 - alone_s / update_s, 0.0, 1.0)),
        memory,
    )


def _on_host(parts: Components, shape: Shape, rng: np.random.Generator) -> tuple[HostTimes, Floats]:
    """Return the times nearest to so many instances on a host, and the seconds of an update of all of these."""
    count = max(measured for measured in parts.times if measured <= shape.per_host)
    times = parts.times[count]
    measured_s = np.full(_DRAWS, times.seconds(shape.num_passes))
    if count == shape.per_host:
        return times, measured_s
    fewer, doublings = parts.times.get(count // 2, times), math.log2(shape.per_host / count)
    more = rng.uniform(*_FURTHER_DOUBLING, _DRAWS) * doublings
    if shape.per_host * parts.threads <= parts.num_cores:
        return times, measured_s + more * max(0.0, times.busy_once_s - fewer.busy_once_s)
    # The cores are idle only around meetings: together, instances take their processor time.
    crowded = parts.crowded
    if crowded is None:
        pass_s, waited_s = times.busy_pass_s * rng.uniform(*_CROWDED, _DRAWS), np.zeros(_DRAWS)
        added_s = max(0.0, times.busy_once_s - fewer.busy_once_s)
    else:
        # Measured with half of the cores, so against half as many instances that have a core each.
        pass_s = np.full(_DRAWS, times.busy_pass_s * max(1.0, crowded.busy_pass_s / fewer.busy_pass_s))
        added_s = max(0.0, crowded.busy_once_s - fewer.busy_once_s)
        # What those of one core wait for, whose turn comes late, and what those of several cores wait for.
        turns_s = max(0.0, crowded.first_s - 2 * crowded.busy_first_s / parts.threads)
        others_s = max(0.0, times.first_s - times.busy_first_s / parts.threads)
        further = math.log2(shape.per_host) / math.log2(2 * count)
        waited_s = (turns_s + others_s) * further * rng.uniform(0.5, 1.5, _DRAWS)
    busy_s = shape.num_passes * pass_s + times.busy_once_s + more * added_s
    return times, np.maximum(measured_s, busy_s * shape.per_host / parts.num_cores + waited_s)


def _slowest(count: int) -> float:
    """Return by how many standard deviations the slowest of `count` is expected to be late (Blom's formula)."""
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _memory(parts: Components, shape: Shape, rng: np.random.Generator) -> Interval | None:
    if parts.memory_bytes is None:
        return None
    num_replicas, num_instances = shape.num_replicas, shape.num_instances
    num_subtrees = 1
    if num_instances & (num_instances - 1):  # otherwise every block is one
        num_subtrees = max(len(subtrees(block, num_replicas)) for block in deal(num_replicas, num_instances))
    sums = math.ceil(math.log2(-(-num_replicas // num_instances))) + (num_instances > 1) * num_subtrees
    total = parts.memory_bytes + parts.gradient_bytes * sums
    return Interval.of(total * np.exp(rng.standard_normal(_DRAWS) * _MEMORY_SPREAD))


@dataclass(frozen=True)
class Change:
    """Something to try, and what it would give."""

    what: str
    forecast: Forecast
    #: whether the weights differ from those of the recipe as it is
    changes_training: bool


def changes(parts: Components, shape: Shape, network: Network | None, per_host_most: int) -> list[Change]:
    """Return what may help, the most samples per second first."""

    def tried(what: str, other: Shape, *, differs: bool, of: Components = parts) -> Change:
        return Change(what, forecast(of, other, network), differs)

    def longer(factor: int) -> Mapping[str, int]:
        """Return the counts of a training whose updates have more samples."""
        names = ("total_updates", "updates_per_epoch")
        return {name: max(1, getattr(shape, name) // factor) for name in names if getattr(shape, name)}

    found = [
        tried(
            f"accumulation {2 * shape.num_accumulation}: half as many reductions",
            replace(shape, num_accumulation=2 * shape.num_accumulation, **longer(2)),
            differs=True,
        )
    ]
    doubled = replace(
        parts,
        times={
            count: replace(
                times,
                first_s=times.first_s + times.pass_s,
                pass_s=2 * times.pass_s,
                busy_first_s=times.busy_first_s + times.busy_pass_s,
                busy_pass_s=2 * times.busy_pass_s,
            )
            for count, times in parts.times.items()
        },
    )
    bigger = replace(shape, micro_batch=2 * shape.micro_batch, **longer(2))
    found.append(
        tried(f"micro-batch {bigger.micro_batch}: costs of an update are shared", bigger, differs=True, of=doubled)
    )
    if 2 * shape.num_instances <= shape.num_replicas:
        more = 2 * shape.num_instances
        hosts = shape.num_hosts if -(-more // shape.num_hosts) <= per_host_most else 2 * shape.num_hosts
        if hosts == 1 or network is not None:
            found.append(tried(_instances(more), replace(shape, num_instances=more, num_hosts=hosts), differs=False))
    if shape.num_instances > 1:
        fewer = replace(shape, num_instances=shape.num_instances // 2, num_hosts=max(1, shape.num_hosts // 2))
        found.append(tried(f"{_instances(fewer.num_instances)}: fewer devices", fewer, differs=False))
    if shape.num_hosts > 1 and network is not None:
        free = Network(0.0, 1e15, (1.0, 1.0), "")
        hidden = Change("all communication hidden behind the passes (a bound)", forecast(parts, shape, free), False)
        found.append(hidden)
    return sorted(found, key=lambda change: -change.forecast.samples_per_second.value)


def _instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count:,} instances"
