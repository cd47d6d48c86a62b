"""The page of a profile: one self-contained file, which needs nothing but a browser."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podium.profiling.events import Profiled
from podium.profiling.findings import LayerRow, OperatorRow, on_roofline
from podium.profiling.memory import KINDS, MemoryProfile
from podium.profiling.peaks import Peaks
from podium.profiling.rates import Rates
from podium.profiling.stragglers import InstancesProfile
from podium.ui.page import render_page, short

_MAX_ROWS = 400


@dataclass(frozen=True)
class Profile:
    """Everything that was measured."""

    name: str
    where: str
    rates: Rates
    peaks: Peaks
    profiled: Profiled
    layers: Sequence[LayerRow]
    operators: Sequence[OperatorRow]
    memory: MemoryProfile | None
    instances: InstancesProfile | None
    trace: str


def profile_page(profile: Profile) -> str:
    """Return the page as HTML."""
    profiled = profile.profiled
    parts = {way: profiled.total_us(way) for way in ("forward", "backward", "optimiser", "other")}
    flops = sum(row.flops for row in profile.layers)
    data: dict[str, Any] = {
        "peaks": {"flops": profile.peaks.flops_per_second, "bytes": profile.peaks.bytes_per_second},
        "roofline": [_shortened(row) for row in on_roofline(list(profile.layers), profile.peaks)],
        "timeline": {
            "length": profiled.timeline_us,
            "bars": [[lane, name, short(start), short(took)] for lane, name, start, took in profiled.timeline],
        },
        "layers": [
            {
                "name": row.name,
                "forward": short(row.forward_ms),
                "backward": short(row.backward_ms),
                "flops": short(row.flops),
                "rate": short(row.flops_per_second),
                "operator": row.operator,
                "kernel": bool(row.kernel),
            }
            for row in profile.layers[:_MAX_ROWS]
        ],
        "operators": [
            {
                "name": row.name,
                "kernel": row.kernel,
                "calls": short(row.calls),
                "ms": short(row.ms),
                "flops": short(row.flops),
            }
            for row in profile.operators[:_MAX_ROWS]
            if row.ms > 0
        ],
        "update_us": profiled.update_us,
        "parts": [[name, short(us / 1e3)] for name, us in parts.items()],
        "memory": _memory(profile.memory),
        "instances": _instances(profile.instances),
        "rates": {
            "input": short(profile.rates.input),
            "compute": short(profile.rates.compute),
            "both": short(profile.rates.both),
        },
    }
    return render_page(
        "profile.html.j2",
        "podium.profiling",
        title=profile.name,
        data=data,
        scripts=["profile.js"],
        where=profile.where,
        trace=profile.trace,
        bottleneck=profile.rates.bottleneck,
        straggler=profile.instances.sentence() if profile.instances else "",
        has_memory=profile.memory is not None,
        has_instances=profile.instances is not None,
        num_updates=profiled.num_updates,
        gflops=flops / 1e9,
        achieved=1e6 * flops / profiled.update_us / profile.peaks.flops_per_second if profiled.update_us else 0.0,
    )


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {name: short(value) if isinstance(value, float) else value for name, value in row.items()}


def _memory(memory: MemoryProfile | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {
        "times": [short(at) for at in memory.times],
        "bytes": {kind: [short(value) for value in memory.bytes[kind]] for kind in KINDS},
        "peak": {kind: memory.peak[kind] for kind in KINDS},
        "at": memory.peak_at,
        "process": memory.process_bytes,
        "largest": [
            {"bytes": block.bytes, "kind": block.kind, "operator": block.operator, "module": block.module}
            for block in memory.largest
        ],
        "parts": [[span.name, short(span.start), short(span.end)] for span in memory.parts],
    }


def _instances(found: InstancesProfile | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "rate": short(found.samples_per_second),
        "rows": [
            {
                "index": one.index,
                "own": short(one.own_ms),
                "waits": short(one.waits_ms),
                "slow": short(one.slow_ms),
                "exchange": None if one.exchange_ms is None else short(one.exchange_ms),
                "hidden": None if one.hidden is None else short(one.hidden),
            }
            for one in found.instances
        ],
    }
