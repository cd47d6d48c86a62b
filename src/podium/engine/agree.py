"""What an instance knows, told to all: only instance 0 looks at the run folder; hosts need not share a file system."""

import json
from typing import Any

import torch

from podium.engine.instances import Instances


def from_first(instances: Instances, data: bytes | None) -> bytes:
    """The bytes that instance 0 gave; what others give does not matter."""
    if instances.count == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    instances.broadcast(length)
    if data and instances.index == 0:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        values = torch.empty(int(length), dtype=torch.uint8)
    instances.broadcast(values)
    return values.numpy().tobytes()


def agreed(instances: Instances, facts: dict[str, Any] | None) -> dict[str, Any]:
    """A small mapping that instance 0 gave."""
    value: dict[str, Any] = json.loads(from_first(instances, json.dumps(facts or {}).encode()))
    return value


def all_told(instances: Instances, facts: Any) -> list[Any]:
    """What every instance gave, in their order, on all of them: anything that JSON holds, of any length."""
    ours = json.dumps(facts).encode()
    if instances.count == 1:
        return [json.loads(ours)]
    sizes = instances.gather(torch.tensor([len(ours)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(ours)] = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
    rows = instances.gather(padded)
    return [json.loads(row[:size].numpy().tobytes()) for size, row in zip(sizes, rows, strict=True)]
