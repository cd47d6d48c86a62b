"""Named tensors that several instances hold, given to those that want them, from any that has them: when shares of the
optimiser's state are dealt anew, as an instance is lost or has come (`training/resharing.py`).

Nobody needs memory for more than it wants: one tensor is on its way at a time.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from podium.distributed.instances import Instances
from podium.distributed.messages import all_gather_facts


class CopiesLost(Exception):
    """A share lives on none of the instances that are left."""


def check_covered(instances: Instances, held: Iterable[str], every: set[str]) -> None:
    """Raise CopiesLost, on all instances, unless each of `every` name is held by one of them. Collective."""
    found = {name for names in all_gather_facts(instances, sorted(held)) for name in names}
    if missing := every - found:
        raise CopiesLost(min(missing))


def taken(instances: Instances, held: Mapping[str, Tensor], wants: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return those of all held tensors whose names this instance wants, in copies. Collective.

    `held`: what this instance has, in the state that all go on from.
    """
    declared = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in held.items()]
    holder: dict[str, int] = {}
    like: dict[str, tuple[str, list[int]]] = {}
    for index, tensors in enumerate(all_gather_facts(instances, declared)):
        for name, dtype, shape in tensors:
            holder.setdefault(name, index)
            like[name] = dtype, shape
    found = {}
    for name in sorted(holder):
        dtype, shape = like[name]
        is_source = holder[name] == instances.index
        values = held[name].detach().cpu().contiguous() if is_source else None
        if values is None:
            values = torch.empty(shape, dtype=getattr(torch, dtype))
        instances.broadcast(values, holder[name], takes=wants(name))
        if wants(name):
            found[name] = values.clone() if is_source else values
    return found
