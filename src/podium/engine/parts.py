"""Named tensors of which every instance holds a part: gathered to instance 0, and spread from there.

Whoever holds what (shares of an optimiser's state, stages of a pipeline), each instance says which tensors it has, and
a checkpoint is written and read as if instance 0 had them all. One tensor at a time is on its way, so that none needs
the memory of the whole.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from podium.engine.agree import all_told
from podium.engine.instances import Instances, naming_who_is_lost
from podium.tensor_file import file_order


class Parts:
    """Tensors by name, all of them together those of one training."""

    def __init__(self, instances: Instances, own: Mapping[str, Tensor]) -> None:
        """Collective: tells all instances what this one holds. `own` live: they are sent, or filled, as they are then.

        What several hold is the same on each.
        """
        self._instances, self._own = instances, own
        told = all_told(instances, [_said(name, tensor) for name, tensor in own.items()])
        self._holders: dict[str, list[int]] = {}
        like: dict[str, Tensor] = {}
        for index, tensors in enumerate(told):
            for name, dtype, shape in tensors:
                like[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                self._holders.setdefault(name, []).append(index)
        #: names, shapes and types of all, in the order in which they travel and are written
        self.like = {name: like[name] for name in file_order(like)}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. Instance 0 gets all of them, one after the other; the others get nothing, and give theirs."""
        for name, like in self.like.items():
            holder = self._holders[name][0]
            if self._instances.index == 0:
                yield name, self._own[name] if holder == 0 else self._received(like, holder)
            elif self._instances.index == holder:
                self._send(self._own[name], 0)

    def spread(self, values: Mapping[str, Tensor] | None) -> None:
        """Collective. Instance 0 gives the values of all; each takes those it holds into its own tensors."""
        with torch.no_grad():
            for name, like in self.like.items():
                for holder in self._holders[name]:
                    if holder == self._instances.index:
                        if values is not None:
                            self._own[name].copy_(values[name])
                        else:
                            self._own[name].copy_(self._received(like, 0))
                    elif values is not None:
                        self._send(values[name], holder)

    def _send(self, tensor: Tensor, to: int) -> None:
        with naming_who_is_lost(to):
            dist.send(tensor.detach().cpu().contiguous().reshape(-1), to)

    def _received(self, like: Tensor, holder: int) -> Tensor:
        values = torch.empty(like.numel(), dtype=like.dtype)
        with naming_who_is_lost(holder):
            dist.recv(values, holder)
        return values.view(like.shape)


def give_over(parts: Parts) -> None:
    """An instance's side of `gathered` where another writes."""
    for _ in parts.gathered():
        raise AssertionError("only instance 0 gets anything")


def _said(name: str, tensor: Tensor) -> list[Any]:
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
