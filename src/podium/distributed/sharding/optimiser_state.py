"""`parallel.shard: optimiser`: every instance keeps the optimiser state of its own share of the parameters only.

    all instances have the sums of all gradients, and the same divisor (clipping needs the norm of all of them)
    each steps the parameters of its share
    and broadcasts them to the others

Each element is stepped once, from the same sum and by the same kernel as without sharding, so the bits are the same.
Shares consist of whole tensors, for optimisers that use norms of tensors (lars, lamb).
torch's ZeroRedundancyOptimizer wraps torch's own optimiser classes, which are not used here, and saves by pickle.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from podium.distributed.instances import Instances
from podium.distributed.lost import naming_lost_instance

#: parameters are broadcast in messages of up to this many bytes, which need as much extra memory
_MESSAGE_BYTES = 4 << 20


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Return which of `count` instances each item belongs to: the largest first, each to the instance with least."""
    totals = [0] * count
    owner = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owner[item] = min(range(count), key=lambda index: (totals[index], index))
        totals[owner[item]] += sizes[item]
    return owner


class Shares:
    """Which instance steps which parameter; computed from names and sizes, so it is the same on all instances."""

    def __init__(self, params: Mapping[str, nn.Parameter], instances: Instances) -> None:
        self._instances = instances
        sizes = [param.numel() * param.element_size() for param in params.values()]
        owner = dict(zip(params, owners(sizes, instances.count), strict=True))
        #: names of the parameters that this instance steps
        self.own = {name for name, index in owner.items() if index == instances.index}
        self._params: list[list[Tensor]] = [
            [param.detach() for name, param in params.items() if owner[name] == index]
            for index in range(instances.count)
        ]

    def broadcast(self, waited: Callable[[float], None]) -> None:
        """Broadcast the parameters of every share from its owner, after the step. Collective."""
        began = time.perf_counter()
        for index, params in enumerate(self._params):
            if params:
                with naming_lost_instance(index):
                    dist._broadcast_coalesced(self._instances.group(), params, _MESSAGE_BYTES, index)
        waited(time.perf_counter() - began)
