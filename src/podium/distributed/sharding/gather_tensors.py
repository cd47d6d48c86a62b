"""Named tensors of which every instance holds a part: gathered on instance 0, and scattered from there.

However tensors are divided (shares of an optimiser's state, rows of it, stages of a pipeline), each instance declares
which it holds, and a checkpoint is written and read as if instance 0 held them all. Only one tensor is transferred at
a time, so no instance needs the memory of the whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from podium.distributed.instances import Instances
from podium.distributed.lost import naming_lost_instance
from podium.distributed.messages import all_gather_facts


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that one instance holds."""

    holder: int
    shape: list[int]
    #: the first row it holds; None: it holds the whole tensor
    first_row: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the whole `tensor` that this piece covers."""
        return tensor if self.first_row is None else tensor[self.first_row : self.first_row + self.shape[0]]


class GatheredTensors:
    """The named tensors of one training, divided between instances."""

    def __init__(
        self, instances: Instances, own: Mapping[str, Tensor], rows: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Declare to all instances what this one holds. Collective. `own` is kept by reference: its tensors are sent,
        or overwritten, when the methods are called.

        `rows`: (first row, total rows) of those tensors of which this instance holds only some rows. A tensor that
        several instances hold whole is the same on each.
        """
        self._instances, self._own = instances, own
        self._group = None
        if instances.count > 1 and not instances.share_memory:
            self._group = instances.group()  # now, as later only some send and receive
        places = rows or {}
        declared = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *places.get(name, (None, None))]
            for name, tensor in own.items()
        ]
        self._pieces: dict[str, list[_Piece]] = {}
        like: dict[str, Tensor] = {}
        for holder, tensors in enumerate(all_gather_facts(instances, declared)):
            for name, dtype, shape, first_row, num_rows in tensors:
                whole = shape if first_row is None else [num_rows, *shape[1:]]
                like[name] = torch.empty(whole, dtype=getattr(torch, dtype), device="meta")
                self._pieces.setdefault(name, []).append(_Piece(holder, shape, first_row))
        #: names, shapes and types of all tensors, in the order in which they are transferred and written
        self.like = {name: like[name] for name in aligned_order(like)}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors on instance 0, one after the other; the other instances send theirs and yield nothing.
        Collective."""
        for name, like in self.like.items():
            pieces = self._pieces[name]
            if pieces[0].first_row is None:
                pieces = pieces[:1]  # the others hold the same values
            if self._instances.index == 0 and pieces[0].holder == 0 and pieces[0].first_row is None:
                yield name, self._own[name]
                continue
            whole = torch.empty(like.shape if self._instances.index == 0 else 0, dtype=like.dtype)
            for piece in pieces:
                self._move(piece, name, 0, whole)
            if self._instances.index == 0:
                yield name, whole

    def scatter(self, values: Mapping[str, Tensor] | None) -> None:
        """Copy the values that instance 0 passes into the tensors of the instances that hold them. Collective."""
        for name in self.like:
            for piece in self._pieces[name]:
                part = piece.of(values[name]) if values is not None else None
                if piece.holder == 0:
                    if part is not None:
                        _copy(self._own[name], part)
                elif (received := self._moved(part, self.like[name].dtype, piece, 0, piece.holder)) is not None:
                    _copy(self._own[name], received)

    def _move(self, piece: _Piece, name: str, to: int, whole: Tensor) -> None:
        """Transfer a piece from its holder into `whole` on instance `to`."""
        own = self._own[name] if self._instances.index == piece.holder else None
        received = own if piece.holder == to else self._moved(own, whole.dtype, piece, piece.holder, to)
        if self._instances.index == to and received is not None:
            piece.of(whole).copy_(received)

    def _moved(self, values: Tensor | None, dtype: torch.dtype, piece: _Piece, source: int, to: int) -> Tensor | None:
        """Transfer the `values` of instance `source`, of the shape of a piece; return them on instance `to`."""
        index = self._instances.index
        if self._instances.share_memory:  # all take part
            flat = torch.empty(piece.shape, dtype=dtype) if values is None or index != source else _in_order(values)
            self._instances.broadcast(flat, source, takes=index == to)
            return flat if index == to else None
        if index == source and values is not None:
            self._send(values, to)
        return self._received(torch.empty(piece.shape, dtype=dtype, device="meta"), source) if index == to else None

    def _send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            with naming_lost_instance(to):
                dist.send(_in_order(tensor).reshape(-1), group=self._group, group_dst=to)

    def _received(self, like: Tensor, holder: int) -> Tensor:
        values = torch.empty(like.numel(), dtype=like.dtype)
        if values.numel():
            with naming_lost_instance(holder):
                dist.recv(values, group=self._group, group_src=holder)
        return values.view(like.shape)


def _in_order(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def aligned_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which tensors are transferred and stored in a file: widest elements first.

    Stored without gaps, each tensor then starts at a multiple of its element size.
    """
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def send_pieces(parts: GatheredTensors) -> None:
    """Take part in `gathered` on an instance other than 0."""
    for _ in parts.gathered():
        raise AssertionError("only instance 0 receives tensors")


def _copy(into: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        into.copy_(values)
