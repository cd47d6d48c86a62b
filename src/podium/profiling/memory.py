"""The memory of an update over time, by kind: weights, optimiser state, input, activations, gradients, temporary.

torch's profiler says when which block came and went; what it was for follows from when that was. What comes in the
forward pass and outlives it is kept for the backward pass: activations. What comes in the backward pass and outlives
that: gradients. The rest is temporary. Weights, optimiser state and samples are there all the time, and known by their
sizes. What kernels and libraries take without torch is in none of these; the process as a whole is measured beside it.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.optim.state_tensors import state_tensors
from podium.profiling.ranges import MODULE, PART
from podium.training.build import Training
from podium.training.feeding import feed_bytes

LASTING = ("weights", "optimiser", "input")
PASSING = ("activations", "gradients", "temporary")
KINDS = (*LASTING, *PASSING)
_LARGEST = 10


@dataclass(frozen=True)
class Block:
    """A piece of memory from when it came to when it went (infinity: it stayed), in microseconds."""

    came: float
    went: float
    bytes: int
    kind: str
    #: the operator and the module it came for
    operator: str
    module: str


@dataclass(frozen=True)
class Span:
    """A range of the trace."""

    name: str
    start: float
    end: float


@dataclass
class MemoryProfile:
    """Bytes by kind over one update, and its peak."""

    #: microseconds since the beginning of the update, and for each kind its bytes at these moments
    times: list[float]
    bytes: dict[str, list[float]]
    peak_at: float
    peak: dict[str, float]
    #: at the peak, the largest first
    largest: list[Block] = field(default_factory=list)
    #: the process as a whole, measured: its peak in this update, None where the system does not tell
    process_bytes: int | None = None
    parts: list[Span] = field(default_factory=list)

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak.values())


def lasting_bytes(training: Training) -> dict[str, int]:
    """Return the bytes that are there all the time."""
    state = training.state
    weights = [*state.model.parameters(), *state.model.buffers()]
    held = {tensor.data_ptr(): tensor for tensor in state_tensors(state.optimiser).values()}
    return {
        "weights": sum(tensor.numel() * tensor.element_size() for tensor in weights),
        "optimiser": sum(tensor.numel() * tensor.element_size() for tensor in held.values()),
        "input": feed_bytes(training),
    }


def read_memory(trace: Path, lasting: dict[str, int], process_bytes: int | None, points: int = 400) -> MemoryProfile:
    """Return the memory over the update in a trace that was recorded with it."""
    events = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if "ts" in event]
    spans = [Span(one["name"], float(one["ts"]), float(one["ts"]) + float(one.get("dur", 0))) for one in events]
    parts = sorted((span for span in spans if span.name.startswith(PART)), key=lambda span: span.start)
    update = next(span for span in parts if span.name == f"{PART}update")
    blocks = _blocks(events, parts, spans, update)
    profile = _over_time(blocks, lasting, update, points)
    profile.process_bytes = process_bytes
    profile.parts = [
        Span(span.name.removeprefix(PART), span.start - update.start, span.end - update.start)
        for span in parts
        if span is not update and span.start < update.end
    ]
    return profile


def _blocks(
    events: Iterable[dict[str, Any]], parts: Sequence[Span], spans: Sequence[Span], update: Span
) -> list[Block]:
    alive: dict[int, tuple[float, int]] = {}
    found: list[tuple[float, float, int]] = []
    marks = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: float(event["ts"]))
    for mark in marks:
        at, size, address = float(mark["ts"]), int(mark["args"]["Bytes"]), int(mark["args"]["Addr"])
        if size > 0:
            alive[address] = at, size
        elif address in alive:
            came, size = alive.pop(address)
            found.append((came, at, size))
    found += [(came, float("inf"), size) for came, size in alive.values()]
    inside = [block for block in found if update.start <= block[0] <= update.end]
    operators = _Finder(
        [span for span in spans if not span.name.startswith((PART, "[", "autograd::engine", "Profiler"))]
    )
    modules = _Finder([span for span in spans if span.name.startswith(MODULE)])
    nodes = _Finder([span for span in spans if span.name.startswith("autograd::engine::evaluate_function: ")])
    named = []
    for came, went, size in inside:
        operator = operators.outermost(came) if size >= 1024 else ""
        if operator.startswith(MODULE):
            operator = ""
        module = modules.innermost(came).removeprefix(MODULE)
        node = nodes.innermost(came).rpartition(" ")[2]
        named.append(
            Block(came - update.start, went - update.start, size, _kind(came, went, parts), node or operator, module)
        )
    return named


def _kind(came: float, went: float, parts: Sequence[Span]) -> str:
    for span in parts:
        if span.start <= came <= span.end:
            if span.name == f"{PART}forward" and went > span.end:
                return "activations"
            if span.name == f"{PART}backward" and went > span.end:
                return "gradients"
    return "temporary"


class _Finder:
    """Finds the spans around a moment. Spans of one thread nest, so few have to be looked at."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self._spans]

    def _around(self, at: float) -> list[Span]:
        last = bisect.bisect_right(self._starts, at)
        return [span for span in self._spans[max(0, last - 400) : last] if span.end >= at]

    def innermost(self, at: float) -> str:
        around = self._around(at)
        return around[-1].name if around else ""

    def outermost(self, at: float) -> str:
        """Return the first that is no module."""
        return next((span.name for span in self._around(at) if not span.name.startswith(MODULE)), "")


def _over_time(blocks: Sequence[Block], lasting: dict[str, int], update: Span, points: int) -> MemoryProfile:
    length = update.end - update.start
    changes = sorted(
        [(block.came, block.bytes, block.kind) for block in blocks]
        + [(block.went, -block.bytes, block.kind) for block in blocks if block.went <= length]
    )
    now: dict[str, float] = defaultdict(float)
    highest, peak_at, peak = -1.0, 0.0, dict.fromkeys(PASSING, 0.0)
    # Of each of `points` stretches of time the moment with the most is kept, so that no peak is lost.
    kept: dict[int, tuple[float, float, dict[str, float]]] = {0: (0.0, 0.0, dict.fromkeys(PASSING, 0.0))}
    for at, size, kind in changes:
        now[kind] += size
        total = sum(now.values())
        if total > highest:
            highest, peak_at, peak = total, at, {name: now[name] for name in PASSING}
        place = min(points - 1, int(points * at / length)) if length > 0 else 0
        if place not in kept or total >= kept[place][0]:
            kept[place] = total, at, {name: now[name] for name in PASSING}
    rows = [kept[place] for place in sorted(kept)]
    times = [at for _, at, _ in rows] + [length]
    rows.append((0.0, length, {name: now[name] for name in PASSING}))
    series = {kind: [float(lasting[kind])] * len(times) for kind in LASTING}
    series |= {kind: [row[2][kind] for row in rows] for kind in PASSING}
    there = sorted((block for block in blocks if block.came <= peak_at < block.went), key=lambda block: -block.bytes)
    constant = {kind: float(size) for kind, size in lasting.items()}
    return MemoryProfile(times, series, peak_at, {**constant, **peak}, there[:_LARGEST])
