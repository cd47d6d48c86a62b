"""The exact sum over replicas: a fixed binary tree on the replica index (`podium/replica_tree.py`).

Every instance sums the subtrees inside its block of replicas (`TreeSum`); the instances join them in the tree's order
(`summed_buffers.py`), with the same additions that one instance would have made.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from podium.machine import foreach
from podium.replica_tree import middle

Tensors = list[Tensor | None]


class TreeSum:
    """The sums of lists of tensors pushed in replica order, one for each subtree inside a block of leaves.

    Keeps the sums of complete subtrees, and at most log2(leaves) + 1 partial sums of the one that is being added up.
    Pushed tensors must not be used afterwards: sums are formed in place in the left operand.
    """

    def __init__(self, num_leaves: int, block: range | None = None) -> None:
        """Prepare for the leaves of `block`: all of them, if there is none."""
        self._block = range(num_leaves) if block is None else block
        self.partial: list[Tensors] = []
        self._num_merges = [0] * len(self._block)  # by leaf: how many ranges of the tree end with it, in the block
        self._count_merges(0, num_leaves)
        self._next = 0

    @property
    def is_next_kept(self) -> bool:
        """Whether the tensors of the next leaf will be kept and added to, instead of being added to those before."""
        return self._num_merges[self._next] == 0

    def push(self, tensors: Tensors) -> None:
        self.partial.append(tensors)
        for _ in range(self._num_merges[self._next]):
            right = self.partial.pop()
            self.partial[-1] = add_in_place(self.partial[-1], right)
        self._next += 1

    def total(self) -> Tensors:
        """Return the sum of a block that is one subtree, once every leaf has been pushed."""
        assert self._next == len(self._num_merges), "leaves are missing"
        (total,) = self.partial
        return total

    def before_last(self) -> tuple[list[Tensors], list[Tensors]]:
        """Return (sums of complete subtrees, partial sums of the last one), while only the last leaf is missing.

        The sum of the last subtree is that leaf added to the partial sums from right to left, which `ExactReduction`
        does piece by piece.
        """
        assert self._next == len(self._num_merges) - 1, "more than the last leaf is missing"
        num_complete = len(self.partial) - self._num_merges[-1]
        return self.partial[:num_complete], self.partial[num_complete:]

    def _count_merges(self, lo: int, hi: int) -> None:
        if hi - lo > 1 and lo < self._block.stop and hi > self._block.start:
            if self._block.start <= lo and hi <= self._block.stop:
                self._num_merges[hi - 1 - self._block.start] += 1
            mid = middle(lo, hi)
            self._count_merges(lo, mid)
            self._count_merges(mid, hi)


def add_in_place(left: Tensors, right: Tensors) -> Tensors:
    """Add `right` to `left`, tensor by tensor; a missing tensor (a parameter without gradient) counts as zero."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        foreach.add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Reduction(Protocol):
    """The way from the replicas of this instance to sums over all replicas; methods are in the order of the calls."""

    #: the module that runs the forward passes
    model: nn.Module
    #: the sums of the floating-point buffers, after `finish`
    buffer_totals: list[Tensor]

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Return a context for the forward and backward pass of a micro-batch; `last`: the last one of the last local
        replica."""
        ...

    def take(self) -> Tensors:
        """Return what to push onto the tree, after any local replica but the last."""
        ...

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        """Start the reduction, when only the last backward pass is left; `count` is the number of items of all local
        replicas."""
        ...

    def finish(self) -> tuple[Tensor | float, bool]:
        """Leave the sums of gradients in `param.grad`; return what to divide them by and whether any instance stops."""
        ...

    def leave(self) -> None:
        """Take no further part, in the middle of an update too; nothing else is called afterwards."""
        ...


class LocalReduction:
    """The reduction where one instance carries all replicas, without communication."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> None:
        self.model = model
        self.buffer_totals: list[Tensor] = []
        self._params, self._buffers = params, buffers
        self._started: tuple[TreeSum, int, bool] | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext()

    def take(self) -> Tensors:
        return take_gradients(self._params, self._buffers)

    def start(self, tree: TreeSum, count: int, stop: bool) -> None:
        self._started = (tree, count, stop)

    def finish(self) -> tuple[int, bool]:
        assert self._started is not None
        tree, count, stop = self._started
        self._started = None
        if tree.partial:  # otherwise the only replica's gradients are in place already
            tree.push(self.take())
            sums = tree.total()
            for param, grad in zip(self._params, sums, strict=False):
                param.grad = grad
            self.buffer_totals = [total for total in sums[len(self._params) :] if total is not None]
        return count, stop

    def leave(self) -> None:
        self._started = None


def take_gradients(params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Tensors:
    """Remove a replica's gradients from its parameters; return them with copies of its floating-point buffers."""
    grads: Tensors = [param.grad for param in params]
    for param in params:
        param.grad = None
    return grads + [buffer.clone() for buffer in buffers]


def replica_mean(total: Tensor, start: Tensor, num_replicas: int) -> Tensor:
    """Return the mean of a buffer over replicas that all began at `start`, from their sum over the tree.

    A buffer that no replica changed keeps its value even where num_replicas · x / num_replicas is not exactly x (only
    powers of two guarantee that): otherwise a constant of the model would drift by a rounding error per update.
    """
    mean = total * (1.0 / num_replicas)
    if num_replicas & (num_replicas - 1) == 0:
        return mean
    return torch.where(total == _multiple(start, num_replicas), start, mean)


def _multiple(tensor: Tensor, num_leaves: int) -> Tensor:
    """Return the tree's sum of `num_leaves` equal leaves."""
    if num_leaves == 1:
        return tensor
    left = (num_leaves + 1) // 2
    return _multiple(tensor, left) + _multiple(tensor, num_leaves - left)
