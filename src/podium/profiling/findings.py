"""What a profile found, as tables: time by module and by operator, and where layers stand on the roofline."""

from collections.abc import Mapping
from dataclasses import dataclass

from podium.profiling.events import Profiled
from podium.profiling.peaks import Peaks
from podium.profiling.work import Work
from podium.ui.console import number
from podium.ui.table import Table

#: operators that may do the products of a layer
_PRODUCTS = ("mm", "conv", "attention", "linear", "addbmm", "matmul")
_ROWS = 15
#: layers with a smaller part of the FLOPs are left out of the picture
_LEAST_SHARE = 0.001


@dataclass(frozen=True)
class LayerRow:
    """A module without those inside it, per update."""

    name: str
    forward_ms: float
    backward_ms: float
    flops: float
    bytes: float
    #: what took most of its time
    operator: str
    kernel: str

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def flops_per_second(self) -> float:
        return 1e3 * self.flops / self.ms if self.ms > 0 else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes > 0 else 0.0


@dataclass(frozen=True)
class OperatorRow:
    """An operator, or one of our kernels under its name, per update."""

    name: str
    kernel: bool
    calls: float
    ms: float
    #: products of the layers whose work it does; 0 where it has none
    flops: float


def layer_rows(profiled: Profiled, work: Mapping[str, Work], passes: int) -> list[LayerRow]:
    """Return all modules that took time, in the order of the model; `passes`: micro-batches of an update here."""
    names = list(dict.fromkeys([*work, *(place.module for place, _ in profiled.spent)]))
    rows = []
    for name in names:
        times = {way: profiled.total_us(way, name) / 1e3 for way in ("forward", "backward")}
        if not sum(times.values()):
            continue
        of_it = {
            (operator, place.kernel): spent.us
            for (place, operator), spent in profiled.spent.items()
            if place.module == name and place.direction in ("forward", "backward")
        }
        operator, kernel = max(of_it, key=lambda key: of_it[key])
        needs = work.get(name, Work())
        rows.append(
            LayerRow(
                name or "(loss and the model itself)",
                times["forward"],
                times["backward"],
                passes * needs.flops,
                passes * needs.bytes,
                operator,
                kernel,
            )
        )
    return rows


def operator_rows(profiled: Profiled, work: Mapping[str, Work], passes: int) -> list[OperatorRow]:
    """Return operators and kernels, the costliest first.

    The FLOPs of a layer and direction are those of the operator that does most of its products there.
    """
    ms: dict[tuple[str, bool], float] = {}
    calls: dict[tuple[str, bool], float] = {}
    flops: dict[tuple[str, bool], float] = {}
    workhorses: dict[tuple[str, str], tuple[float, tuple[str, bool]]] = {}
    for (place, operator), spent in profiled.spent.items():
        key = operator, bool(place.kernel)
        ms[key] = ms.get(key, 0.0) + spent.us / 1e3
        calls[key] = calls.get(key, 0.0) + spent.calls
        if place.kernel or any(word in operator.lower() for word in _PRODUCTS):
            best = workhorses.get((place.module, place.direction), (0.0, key))
            if spent.us > best[0]:
                workhorses[place.module, place.direction] = spent.us, key
    for (module, direction), (_, key) in workhorses.items():
        needs = work.get(module, Work())
        own = {"forward": needs.forward_flops, "backward": needs.backward_flops}.get(direction, 0.0)
        flops[key] = flops.get(key, 0.0) + passes * own
    rows = [
        OperatorRow(name, ours, calls[name, ours], ms[name, ours], flops.get((name, ours), 0.0)) for name, ours in ms
    ]
    return sorted(rows, key=lambda row: -row.ms)


def operators_table(rows: list[OperatorRow], update_ms: float) -> Table:
    """Return the costliest operators as a table for the terminal."""
    total = sum(row.ms for row in rows) or 1.0
    return Table(
        "where the time goes",
        ["operator", "calls per update", "ms per update", "share", "GFLOP/s"],
        [
            [
                f"{row.name} (Podium)" if row.kernel else row.name,
                number(row.calls),
                number(row.ms),
                f"{row.ms / total:.1%}",
                number(row.flops / row.ms / 1e6) if row.flops and row.ms else "",
            ]
            for row in rows[:_ROWS]
            if row.ms > 0
        ],
        f"an update took {number(update_ms)} ms under the profiler, which slows it",
    )


def on_roofline(rows: list[LayerRow], peaks: Peaks) -> list[dict[str, float | str]]:
    """Return the layers with products: FLOPs per byte, FLOP/s, and the share of what the roof allows there."""
    total = sum(row.flops for row in rows) or 1.0
    return [
        {
            "name": row.name,
            "intensity": row.intensity,
            "rate": row.flops_per_second,
            "roof": min(peaks.flops_per_second, peaks.bytes_per_second * row.intensity),
            "ms": row.ms,
            "kernel": row.kernel,
        }
        for row in rows
        if row.flops > _LEAST_SHARE * total and row.bytes > 0 and row.ms > 0
    ]
