"""The exact sum over replicas: a fixed binary tree on the replica index.

Inside an instance the replicas come one after the other; `TreeSum` adds them pairwise as they come, holding at most
log2(replicas) partial sums. The shape of the tree depends on the number of replicas alone.
"""

import torch
from torch import Tensor

Tensors = list[Tensor | None]


class TreeSum:
    """Adds lists of tensors pushed in replica order; equal-sized subtrees are merged as soon as both are there.

    Pushed tensors are given away: sums are formed in place in the left operand.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensors]] = []  # (replicas summed, sums), sizes strictly falling

    def push(self, tensors: Tensors) -> None:
        self._partial.append((1, tensors))
        while len(self._partial) > 1 and self._partial[-2][0] == self._partial[-1][0]:
            self._merge()

    def total(self) -> Tensors:
        """The sum of everything pushed; a count that is no power of two is completed from the right."""
        while len(self._partial) > 1:
            self._merge()
        return self._partial.pop()[1]

    def _merge(self) -> None:
        size_right, right = self._partial.pop()
        size_left, left = self._partial.pop()
        self._partial.append((size_left + size_right, add_in_place(left, right)))


def add_in_place(left: Tensors, right: Tensors) -> Tensors:
    """left += right, tensor by tensor; a missing tensor (a parameter without gradient) counts as zero."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
