"""`parallel.shard: optimiser`: every instance keeps the optimiser's state of its share of the parameters alone.

    all instances have the sums of all gradients, and the same divisor (clipping needs the norm of all of them)
    each steps the parameters of its share
    and gives them to the others

Each element is stepped once, from the same sum and by the same kernel as without sharding: the same bits. Whole
tensors are shared out, for optimisers that look at norms of tensors (lars, lamb).
torch's ZeroRedundancyOptimizer wraps optimisers of torch's own kind, which those here are not, and saves by pickle.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from podium.engine.instances import Instances
from podium.engine.lost import naming_who_is_lost

#: parameters travel in messages of up to so many bytes; as much memory is needed beside them
_MESSAGE_BYTES = 4 << 20


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` instances each item belongs to: the largest first, always to the one that has least."""
    totals = [0] * count
    owner = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owner[item] = min(range(count), key=lambda index: (totals[index], index))
        totals[owner[item]] += sizes[item]
    return owner


class Shares:
    """Who steps which parameter. The same on all instances, from names and sizes alone."""

    def __init__(self, params: Mapping[str, nn.Parameter], instances: Instances) -> None:
        self._instances = instances
        sizes = [param.numel() * param.element_size() for param in params.values()]
        owner = dict(zip(params, owners(sizes, instances.count), strict=True))
        #: names of those that this instance steps
        self.own = {name for name, index in owner.items() if index == instances.index}
        self._params: list[list[Tensor]] = [
            [param.detach() for name, param in params.items() if owner[name] == index]
            for index in range(instances.count)
        ]

    def give(self, waited: Callable[[float], None]) -> None:
        """Collective, after the step: parameters of every share become those of its owner."""
        began = time.perf_counter()
        for index, params in enumerate(self._params):
            if params:
                with naming_who_is_lost(index):
                    dist._broadcast_coalesced(self._instances.group(), params, _MESSAGE_BYTES, index)
        waited(time.perf_counter() - began)
