"""Which blocks of a model are on which device of a pipeline. Pure functions from names and costs to a plan.

    blocks      Embedding  Encoder 0 … Encoder 11  Pooler  Classifier
    layers                 ^^^^^^^^^^^^^^^^^^^^^^             counted by `parallel.stages`: [0, 4, 4, 4]
    parts       0          1, 2, 3                 4          consecutive blocks that run on one device
    devices     0          1, 2, 3                 0          the first and the last part share a device

Blocks before and after the layers are on device 0, so that a head may share its weights with the embedding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from podium.errors import UserError


@dataclass(frozen=True)
class Split:
    """The parts of a model: consecutive ranges of blocks, one for each device and a last one, again on device 0."""

    names: tuple[str, ...]
    parts: tuple[range, ...]

    @property
    def num_devices(self) -> int:
        return len(self.parts) - 1

    def device_of_part(self, part: int) -> int:
        return part % self.num_devices

    def parts_of(self, device: int) -> list[int]:
        return [part for part in range(len(self.parts)) if self.device_of_part(part) == device]

    def blocks_of(self, device: int) -> list[int]:
        return [block for part in self.parts_of(device) for block in self.parts[part]]

    def device_of(self, block: int) -> int:
        (part,) = [number for number, blocks in enumerate(self.parts) if block in blocks]
        return self.device_of_part(part)

    def lines(self) -> list[str]:
        """Return the allocation of blocks to devices, one line per block."""
        return [f"{name} → device {self.device_of(block)}" for block, name in enumerate(self.names)]


def layers_of(blocks: Sequence[nn.Module]) -> range:
    """Return the layers among the blocks of a newly built model: from the first to the last instance of the class that
    most blocks belong to, directly or by inheritance."""
    counts = Counter(kind for block in blocks for kind in type(block).__mro__ if kind not in nn.Module.__mro__)
    most = max(counts, key=lambda kind: (counts[kind], len(kind.__mro__)))
    places = [place for place, block in enumerate(blocks) if isinstance(block, most)]
    return range(places[0], places[-1] + 1)


def split_blocks(
    names: Sequence[str], layers: range, stages: int | Sequence[int], costs: Sequence[float] | None = None
) -> Split:
    """Assign blocks to devices: by the given numbers of layers, or balanced by cost if `stages` is a single number."""
    if isinstance(stages, int):
        counts = _balanced(layers, stages, costs or [1.0] * len(names))
    else:
        counts = list(stages)
        if sum(counts) != len(layers):
            shown = ", ".join(map(str, counts))
            raise UserError(
                f"parallel.stages = [{shown}] has {_layers(sum(counts))}, but the model has {len(layers)} "
                f"({names[layers.start]} to {names[layers.stop - 1]})"
            )
    if len(counts) > 1 and not layers.start and not counts[0]:
        raise UserError(
            f"parallel.stages = [{', '.join(map(str, counts))}] leaves device 0 without a first block: this model has "
            "no blocks before its layers, so the first number must be at least 1"
        )
    empty = [device for device, count in enumerate(counts) if device and not count]
    if empty:
        raise UserError(f"parallel.stages leaves device {empty[0]} without a layer")
    ends = [layers.start + sum(counts[: device + 1]) for device in range(len(counts))]
    starts = [0, *ends]
    parts = [range(start, end) for start, end in zip(starts, [*ends, len(names)], strict=True)]
    return Split(tuple(names), tuple(parts))


def _balanced(layers: range, num_devices: int, costs: Sequence[float]) -> list[int]:
    """Return the number of layers on each device that minimises the cost of the costliest device."""
    first = 0 if layers.start else 1  # without blocks before the layers, device 0 needs a layer
    if len(layers) < num_devices - 1 + first:
        raise UserError(
            f"parallel.stages = {num_devices} is too many for a model of {_layers(len(layers))}: at most "
            f"{len(layers) + 1 - first}"
        )
    ends = sum(costs[: layers.start]) + sum(costs[layers.stop :])
    until = [0.0]
    for block in layers:
        until.append(until[-1] + costs[block])
    # best[n]: (highest cost, sum of squared costs, layers on each device) for the first n layers on the devices so far
    best: dict[int, tuple[float, float, list[int]]] = {}
    for count in range(first, len(layers) + 1):
        cost = ends + until[count]
        best[count] = (cost, cost * cost, [count])
    for _ in range(1, num_devices):
        found: dict[int, tuple[float, float, list[int]]] = {}
        for before, (costliest, squares, counts) in best.items():
            for end in range(before + 1, len(layers) + 1):
                cost = until[end] - until[before]
                candidate = (max(costliest, cost), squares + cost * cost, [*counts, end - before])
                if end not in found or candidate < found[end]:
                    found[end] = candidate
        best = found
    return best[len(layers)][-1]


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
