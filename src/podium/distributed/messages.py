"""Small messages between all instances: only instance 0 reads the run folder, as hosts need not share a file
system."""

import json
from typing import Any

import torch

from podium.distributed.instances import Instances


def broadcast_bytes(instances: Instances, data: bytes | None, source: int = 0) -> bytes:
    """Return the bytes of instance `source` on all instances; what the others pass is ignored."""
    if instances.count == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    instances.broadcast(length, source)
    if data and instances.index == source:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        values = torch.empty(int(length), dtype=torch.uint8)
    instances.broadcast(values, source)
    return values.numpy().tobytes()


def broadcast_facts(instances: Instances, facts: dict[str, Any] | None, source: int = 0) -> dict[str, Any]:
    """Return the small mapping of instance `source` on all instances."""
    value: dict[str, Any] = json.loads(broadcast_bytes(instances, json.dumps(facts or {}).encode(), source))
    return value


def all_gather_facts(instances: Instances, facts: Any) -> list[Any]:
    """Return the `facts` of all instances in their order, on each of them: any JSON values, of any length."""
    ours = json.dumps(facts).encode()
    if instances.count == 1:
        return [json.loads(ours)]
    sizes = instances.gather(torch.tensor([len(ours)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(ours)] = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
    rows = instances.gather(padded)
    return [json.loads(row[:size].numpy().tobytes()) for size, row in zip(sizes, rows, strict=True)]
