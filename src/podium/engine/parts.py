"""Named tensors of which every instance holds a part: gathered to instance 0, and spread from there.

Whoever holds what (shares of an optimiser's state, rows of it, stages of a pipeline), each instance says which tensors
it has, and a checkpoint is written and read as if instance 0 had them all. One tensor at a time is on its way, so that
none needs the memory of the whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from podium.engine.agree import all_told
from podium.engine.instances import Instances
from podium.engine.lost import naming_who_is_lost
from podium.tensor_file import file_order


@dataclass(frozen=True)
class _Piece:
    """What one instance holds of a tensor."""

    holder: int
    shape: list[int]
    #: the first of the rows it holds; None: it holds all there is
    first_row: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """The place of this piece in the whole."""
        return tensor if self.first_row is None else tensor[self.first_row : self.first_row + self.shape[0]]


class Parts:
    """Tensors by name, all of them together those of one training."""

    def __init__(
        self, instances: Instances, own: Mapping[str, Tensor], rows: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Collective: tells all instances what this one holds. `own` live: they are sent, or filled, as they are then.

        `rows`: (first row, rows in all) of those of which this instance has some rows alone. What several instances
        hold whole is the same on each.
        """
        self._instances, self._own = instances, own
        self._group = instances.group() if instances.count > 1 else None  # later, only some send and receive
        places = rows or {}
        said = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *places.get(name, (None, None))]
            for name, tensor in own.items()
        ]
        self._pieces: dict[str, list[_Piece]] = {}
        like: dict[str, Tensor] = {}
        for holder, tensors in enumerate(all_told(instances, said)):
            for name, dtype, shape, first_row, num_rows in tensors:
                whole = shape if first_row is None else [num_rows, *shape[1:]]
                like[name] = torch.empty(whole, dtype=getattr(torch, dtype), device="meta")
                self._pieces.setdefault(name, []).append(_Piece(holder, shape, first_row))
        #: names, shapes and types of all, in the order in which they travel and are written
        self.like = {name: like[name] for name in file_order(like)}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. Instance 0 gets all of them, one after the other; the others get nothing, and give theirs."""
        for name, like in self.like.items():
            pieces = self._pieces[name]
            if pieces[0].first_row is None:
                pieces = pieces[:1]  # the others have the same
            if self._instances.index == 0 and pieces[0].holder == 0 and pieces[0].first_row is None:
                yield name, self._own[name]
                continue
            whole = torch.empty(like.shape if self._instances.index == 0 else 0, dtype=like.dtype)
            for piece in pieces:
                self._move(piece, name, 0, whole)
            if self._instances.index == 0:
                yield name, whole

    def spread(self, values: Mapping[str, Tensor] | None) -> None:
        """Collective. Instance 0 gives the values of all; each takes those it holds into its own tensors."""
        for name in self.like:
            for piece in self._pieces[name]:
                if values is not None and piece.holder == 0:
                    _copy(self._own[name], piece.of(values[name]))
                elif values is not None:
                    self._send(piece.of(values[name]), piece.holder)
                elif piece.holder == self._instances.index:
                    _copy(self._own[name], self._received(self._own[name], 0))

    def _move(self, piece: _Piece, name: str, to: int, whole: Tensor) -> None:
        """A piece from its holder into `whole` of instance `to`."""
        if self._instances.index == to:
            own = piece.holder == to
            piece.of(whole).copy_(self._own[name] if own else self._received(piece.of(whole), piece.holder))
        elif self._instances.index == piece.holder:
            self._send(self._own[name], to)

    def _send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            with naming_who_is_lost(to):
                dist.send(tensor.detach().cpu().contiguous().reshape(-1), group=self._group, group_dst=to)

    def _received(self, like: Tensor, holder: int) -> Tensor:
        values = torch.empty(like.numel(), dtype=like.dtype)
        if values.numel():
            with naming_who_is_lost(holder):
                dist.recv(values, group=self._group, group_src=holder)
        return values.view(like.shape)


def give_over(parts: Parts) -> None:
    """An instance's side of `gathered` where another writes."""
    for _ in parts.gathered():
        raise AssertionError("only instance 0 gets anything")


def _copy(into: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        into.copy_(values)
