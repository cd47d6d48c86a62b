"""What can be chosen, and the order in which it is tried. Pure; `tuner.py` does the measuring.

A choice is a few recipe keys and a number of instances. The global batch is the same in all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from podium.topology import Blocks, possible_instances

Layout = Literal["default", "channels_last"]

_ANY = Blocks()
#: one pass may hold up to this many times the samples that the recipe has
_MAX_MERGED = 8


@dataclass(frozen=True)
class Choice:
    """One way to run a recipe."""

    layout: Layout
    compile: bool
    #: threads per replica
    threads: int
    micro: int
    accumulation: int
    replicas: int
    instances: int
    prefetch: int

    def same_bits(self, other: "Choice") -> bool:
        """Return True when both give the same weights: they differ at most in instances and prefetch."""
        return replace(self, instances=other.instances, prefetch=other.prefetch) == other

    def keys(self) -> dict[str, Any]:
        """Return the recipe keys; the number of instances is not one."""
        return {key: getattr(self, name) for name, key in KEYS.items()} | {"batch.scaling": "weak"}

    def differing(self, other: "Choice") -> dict[str, Any]:
        """Return the recipe keys, and `instances`, in which it differs from `other`."""
        named = {**KEYS, "instances": "instances"}
        return {
            named[part.name]: getattr(self, part.name)
            for part in fields(self)
            if getattr(self, part.name) != getattr(other, part.name)
        }


KEYS = {
    "layout": "engine.layout",
    "compile": "engine.compile",
    "threads": "engine.threads",
    "micro": "batch.micro",
    "accumulation": "batch.accumulation",
    "replicas": "batch.replicas",
    "prefetch": "engine.prefetch",
}
#: the keys that change no bit
PRESERVING = ("engine.prefetch", "instances")


def shapes(base: Choice) -> Iterator[tuple[int, int, int]]:
    """Yield (micro, accumulation, replicas) with the same global batch: more samples in one pass, or half as many."""
    factor = 1
    while base.accumulation % factor == 0 and factor <= _MAX_MERGED:
        merged = 1
        while base.replicas % merged == 0 and factor * merged <= _MAX_MERGED:
            yield base.micro * factor * merged, base.accumulation // factor, base.replicas // merged
            merged *= 2
        factor *= 2
    if base.micro % 2 == 0:
        yield base.micro // 2, base.accumulation * 2, base.replicas


def choices(base: Choice, num_cores: int, fixed: frozenset[str] = frozenset(), blocks: Blocks = _ANY) -> list[Choice]:
    """Return all combinations worth measuring, the base first; `fixed` are recipe keys (or `instances`) to leave alone.

    Compilation and prefetch are tried later, on the best of these.
    """
    layouts: list[Layout] = [base.layout] if "engine.layout" in fixed else ["channels_last", "default"]
    found = [base]
    for micro, accumulation, replicas in shapes(base):
        if fixed & {"batch.micro", "batch.accumulation", "batch.replicas"} and (
            (micro, accumulation, replicas) != (base.micro, base.accumulation, base.replicas)
        ):
            continue
        for instances in [base.instances] if "instances" in fixed else useful_instances(replicas, num_cores, blocks):
            for threads in [base.threads] if "engine.threads" in fixed else _powers_of_two(num_cores):
                if threads * instances > num_cores and (threads, instances) != (base.threads, base.instances):
                    continue
                for layout in layouts:
                    choice = Choice(
                        layout, base.compile, threads, micro, accumulation, replicas, instances, base.prefetch
                    )
                    if choice not in found:
                        found.append(choice)
    return found


def useful_instances(num_replicas: int, most: int, blocks: Blocks = _ANY) -> list[int]:
    """Return the numbers of instances, up to `most`, whose largest share of the replicas is smaller than that of fewer:
    the others take as long."""
    found: dict[int, int] = {}  # by the largest share: the fewest instances
    for count in possible_instances(num_replicas, blocks=blocks):
        if count <= most:
            found.setdefault(-(-num_replicas // count), count)
    return list(found.values())


def _powers_of_two(most: int) -> list[int]:
    powers = [1]
    while powers[-1] * 2 <= most:
        powers.append(powers[-1] * 2)
    return powers if powers[-1] == most else [*powers, most]


def survivors(rates: dict[Choice, float], base: Choice) -> list[Choice]:
    """Return the better half, the best first; the base stays for comparison, and the best with its bits stays too."""
    ranked = sorted(rates, key=lambda choice: -rates[choice])
    kept = ranked[: max(1, len(ranked) // 2)]
    same = next(choice for choice in ranked if choice.same_bits(base))
    return kept + [choice for choice in (same, base) if choice not in kept]


def halve(
    candidates: Sequence[Choice],
    base: Choice,
    rate: Callable[[Choice, float], float | None],
    *,
    first_s: float,
    time_left: Callable[[], float],
) -> dict[Choice, float]:
    """Measure all candidates for a short time, the better half for twice as long, and so on (successive halving).

    `rate` measures one for so many seconds (None: it cannot be run). Noise only slows down, so the best of a
    candidate's visits counts. Returns the rates of all that were measured.
    """
    rates: dict[Choice, float] = {}
    alive, seconds = list(candidates), first_s
    while True:
        for choice in alive:
            if time_left() <= 0 and base in rates:
                return rates
            found = rate(choice, seconds)
            if found is not None:
                rates[choice] = max(found, rates.get(choice, 0.0))
        reached = {choice: rates[choice] for choice in alive if choice in rates}
        if base not in reached:
            return rates
        kept = survivors(reached, base)
        if len(kept) >= len(reached):
            return rates
        alive, seconds = kept, seconds * 2
