"""A few updates under torch's profiler, and what each recorded operator belongs to: part of an update, module, kernel.

Operators of the backward pass belong to the module whose forward pass made their node: both carry its sequence number.
What runs inside one of our own kernels counts as that kernel. Times are those of the operators themselves, without what
they call; the profiler slows all of them a little.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from podium.engine.update import Events
from podium.kernels.registry import KERNELS
from podium.profiling.ranges import MODULE, PART, modules_named, part
from podium.profiling.rates import NUM_WARM_UP, SMALL_LR
from podium.training.build import Training
from podium.training.feeding import build_engine, samples_of_updates

Direction = Literal["forward", "backward", "optimiser", "other"]
NUM_UPDATES = 5
_NODE = "autograd::engine::evaluate_function: "
#: what the profiler says of itself and of memory
_NO_OPERATORS = ("[memory]", "profiler::")
_PYTHON = "(Python and waiting)"


@dataclass(frozen=True)
class Place:
    """What an operator belongs to."""

    direction: Direction = "other"
    module: str = ""
    #: the kernel of ours that it is, or is a part of
    kernel: str = ""


@dataclass
class Spent:
    """Microseconds and calls, per update."""

    us: float = 0.0
    calls: float = 0.0


@dataclass
class Profiled:
    """What a few updates spent their time on, all of it per update."""

    num_updates: int
    update_us: float
    #: by place and name of the operator
    spent: dict[tuple[Place, str], Spent] = field(default_factory=dict)
    #: of one update: lane, name, beginning and length in microseconds
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    #: the length of that update
    timeline_us: float = 0.0

    def total_us(
        self, direction: Direction | None = None, module: str | None = None, kernel: str | None = None
    ) -> float:
        """Return the time of all operators of a direction, a module without those inside it, a kernel."""
        return sum(
            spent.us
            for (place, _), spent in self.spent.items()
            if direction in (None, place.direction)
            and module in (None, place.module)
            and kernel in (None, place.kernel)
        )


def profile_updates(training: Training, trace: Path | None = None, *, memory: bool = False) -> Any:
    """Run a few updates (one with `memory`) after a warm-up; return torch's profiler, written to `trace` if given."""
    device = training.placement.device
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    engine = build_engine(training, Events(span=part))
    count = 1 if memory else NUM_UPDATES
    with samples_of_updates(training, 0, NUM_WARM_UP + count) as samples:
        for update in range(NUM_WARM_UP):
            engine.update(update, next(samples), SMALL_LR)
        engine.collect()
        named: Any = modules_named(training.state.model)
        with named, profile(activities=kinds, record_shapes=True, profile_memory=memory) as profiled:
            for update in range(NUM_WARM_UP, NUM_WARM_UP + count):
                with part("update"):
                    with part("input"):
                        of_update = next(samples)
                    engine.update(update, of_update, SMALL_LR)
            with part("collect"):
                engine.collect()  # waits for the device
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    return profiled


def kernel_names() -> dict[str, str]:
    """Return by the name in a trace the kernel of ours that it is, of those that are loaded."""
    found: dict[str, str] = {}
    for kernel in KERNELS.values():
        for module in [sys.modules[file] for file in kernel.files if file in sys.modules]:
            for value in vars(module).values():
                own = isinstance(value, type) and issubclass(value, torch.autograd.Function)
                if own and value.__module__ == module.__name__:
                    found |= {value.__name__: kernel.name, f"{value.__name__}Backward": kernel.name}
    return found


def attribute(profiled: Any, model: nn.Module, device: torch.device, kernels: Mapping[str, str]) -> Profiled:
    """Return the time of every operator with what it belongs to."""
    events = [event for event in profiled.events() if not event.name.startswith(_NO_OPERATORS)]
    events.sort(key=lambda event: event.time_range.start)
    places = _Places(model, kernels)
    updates = [event for event in events if event.name == f"{PART}update"]
    count = max(1, len(updates))
    found = Profiled(count, sum(event.time_range.elapsed_us() for event in updates) / count)
    for event in events:
        place = places.of(event)
        own = event.self_device_time_total if device.type != "cpu" else event.self_cpu_time_total
        name = place.kernel or _shown_name(event.name)
        spent = found.spent.setdefault((place, name), Spent())
        spent.us += own / count
        if not place.kernel or event.name in kernels:
            spent.calls += 1 / count
    if updates:
        middle = updates[len(updates) // 2]
        found.timeline, found.timeline_us = _timeline(events, middle, places), middle.time_range.elapsed_us()
    return found


def _shown_name(name: str) -> str:
    if name == f"{PART}input":
        return "(waiting for input)"
    return _PYTHON if name.startswith((MODULE, PART)) else name


class _Places:
    """Finds the place of every event; events are asked for in the order of time."""

    def __init__(self, model: nn.Module, kernels: Mapping[str, str]) -> None:
        self._kernels = kernels
        self._known: dict[int, Place] = {}
        #: the place of the forward operator that made a node, by thread and sequence number
        self._nodes: dict[tuple[int, int], Place] = {}
        self._shapes = {
            name: [tuple(param.shape) for param in module.parameters(recurse=False)]
            for name, module in model.named_modules()
        }

    def of(self, event: Any) -> Place:
        known = self._known.get(event.id)
        if known is None:
            above = self.of(event.cpu_parent) if event.cpu_parent is not None else Place()
            known = self._known[event.id] = self._place(event, above)
            if event.sequence_nr >= 0 and event.scope == 0 and known.direction == "forward":
                self._nodes[event.thread, event.sequence_nr] = known
        return known

    def _place(self, event: Any, above: Place) -> Place:
        name = event.name
        if name.startswith(_NODE):
            made = self._nodes.get((event.fwd_thread, event.sequence_nr), Place())
            return Place("backward", made.module, self._kernels.get(name.removeprefix(_NODE), ""))
        if name.startswith(MODULE):
            return Place("backward" if above.direction == "backward" else "forward", name.removeprefix(MODULE))
        if name.startswith(PART):
            said = name.removeprefix(PART)
            directions: dict[str, Direction] = {
                "forward": "forward", "backward": "backward", "optimiser": "optimiser",
            }  # fmt: skip
            return Place(directions.get(said, "other"))
        kernel = above.kernel or self._kernels.get(name, "")
        if kernel and not above.kernel and above.direction == "forward":
            return Place("forward", self._served(event, above.module), kernel)
        return Place(above.direction, above.module, kernel)

    def _served(self, event: Any, module: str) -> str:
        """Return the module whose work a kernel does: one inside that is not called, but whose weight it is given."""
        shapes = [tuple(shape) for shape in event.input_shapes if shape]
        inside = [
            name
            for name, own in self._shapes.items()
            if own and name.startswith(f"{module}." if module else "") and own[0] in shapes
        ]
        return inside[0] if len(inside) == 1 else module


#: shorter ones are not seen in a picture of the whole update
_SHORTEST, _MOST = 1 / 3000, 2500


def _timeline(events: Sequence[Any], update: Any, places: _Places) -> list[tuple[str, str, float, float]]:
    """Return the bars of one update: its parts, modules by depth in the model, operators."""
    began, length = update.time_range.start, update.time_range.elapsed_us()
    found = []
    for event in events:
        start, took = event.time_range.start - began, event.time_range.elapsed_us()
        if start < 0 or start + took > length * 1.001 or took < length * _SHORTEST or event is update:
            continue
        place = places.of(event)
        if event.name.startswith(PART):
            lane, name = "part", event.name.removeprefix(PART)
        elif event.name.startswith(MODULE):
            lane, name = "module", place.module or "model"
        elif event.name.startswith(_NODE):
            lane, name = "module", f"{place.module or 'loss'} (backward)"
        else:
            parent = event.cpu_parent
            if parent is None or not parent.name.startswith((MODULE, PART, _NODE)):
                continue  # inside another operator
            lane, name = "operator", place.kernel or event.name
        found.append((lane, name, start, took))
    found.sort(key=lambda bar: -bar[3])
    return sorted(found[:_MOST], key=lambda bar: bar[2])
