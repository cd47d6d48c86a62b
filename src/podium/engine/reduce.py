"""The exact sum over replicas: a fixed binary tree on the replica index.

    sum(lo, hi) = sum(lo, mid) + sum(mid, hi),   mid = lo + (hi - lo + 1) // 2

The shape depends on the number of replicas alone. An even range is cut in two equal halves, an odd one has the larger
half on the left; so for every power of two p that divides the number of replicas, the p aligned blocks are subtrees:
p instances may each sum their block (`TreeSum`) and join the results (`Instances.sum_exact`), and the additions are
those that one instance would have made.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

Tensors = list[Tensor | None]


class TreeSum:
    """Adds lists of tensors pushed in replica order, holding at most log2(leaves) + 1 partial sums.

    Pushed tensors are given away: sums are formed in place in the left operand.
    """

    def __init__(self, num_leaves: int) -> None:
        self.partial: list[Tensors] = []
        self._num_merges = [0] * num_leaves  # by leaf: how many ranges of the tree end with it
        self._count_merges(0, num_leaves)
        self._next = 0

    def push(self, tensors: Tensors) -> None:
        self.partial.append(tensors)
        for _ in range(self._num_merges[self._next]):
            right = self.partial.pop()
            self.partial[-1] = add_in_place(self.partial[-1], right)
        self._next += 1

    def total(self) -> Tensors:
        """The sum, once every leaf has been pushed. With all but the last pushed, it would be the last leaf added to
        `partial` from right to left: what `Buckets` does piece by piece."""
        assert self._next == len(self._num_merges), "leaves are missing"
        (total,) = self.partial
        return total

    def _count_merges(self, lo: int, hi: int) -> None:
        if hi - lo > 1:
            mid = lo + (hi - lo + 1) // 2
            self._num_merges[hi - 1] += 1
            self._count_merges(lo, mid)
            self._count_merges(mid, hi)


def add_in_place(left: Tensors, right: Tensors) -> Tensors:
    """left += right, tensor by tensor; a missing tensor (a parameter without gradient) counts as zero."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Reduction(Protocol):
    """How the engine gets from the replicas of this instance to sums over all replicas; in the order of the calls."""

    #: what forward passes are made with
    model: nn.Module
    #: after `finish`: the sums of the floating-point buffers
    buffer_totals: list[Tensor]

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Around the forward and backward pass of a micro-batch; `last` of the last local replica."""
        ...

    def take(self) -> Tensors:
        """After any local replica but the last: what goes onto the tree."""
        ...

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        """Only the last backward pass is left to do; `count` is the number of items of all local replicas."""
        ...

    def finish(self) -> tuple[int | Tensor, bool]:
        """Sums of gradients are in `param.grad`; returns what to divide them by and whether any instance stops."""
        ...


class Local:
    """One instance carries all replicas: nobody to talk to."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> None:
        self.model = model
        self.buffer_totals: list[Tensor] = []
        self._params, self._buffers = params, buffers
        self._started: tuple[TreeSum, int, bool] | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext()

    def take(self) -> Tensors:
        return taken(self._params, self._buffers)

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        self._started = (tree, count, stop)

    def finish(self) -> tuple[int, bool]:
        assert self._started is not None
        tree, count, stop = self._started
        self._started = None
        if tree.partial:  # else the one replica's gradients are where they have to be
            tree.push(self.take())
            sums = tree.total()
            for param, grad in zip(self._params, sums, strict=False):
                param.grad = grad
            self.buffer_totals = [total for total in sums[len(self._params) :] if total is not None]
        return count, stop


def taken(params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Tensors:
    """A replica's gradients, taken out of the parameters, and copies of its floating-point buffers."""
    grads: Tensors = [param.grad for param in params]
    for param in params:
        param.grad = None
    return grads + [buffer.clone() for buffer in buffers]


def replica_mean(total: Tensor, start: Tensor, num_replicas: int) -> Tensor:
    """The mean of a buffer over replicas that all began at `start`, from their sum over the tree.

    A buffer that no replica changed stays as it is, also where num_replicas · x / num_replicas is not quite x (which
    only powers of two promise): else a constant of the model would wander, a rounding per update.
    """
    mean = total * (1.0 / num_replicas)
    if num_replicas & (num_replicas - 1) == 0:
        return mean
    return torch.where(total == _multiple(start, num_replicas), start, mean)


def _multiple(tensor: Tensor, num_leaves: int) -> Tensor:
    """The tree's sum of `num_leaves` equal leaves."""
    if num_leaves == 1:
        return tensor
    left = (num_leaves + 1) // 2
    return _multiple(tensor, left) + _multiple(tensor, num_leaves - left)
