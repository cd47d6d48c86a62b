"""Batch norm of channels-last images in training, with the sum of a residual block and the ReLU that may follow it as
one operator. `kernels/install.py` applies it to single modules, `kernels/fusing.py` to several.

Memory limits all of these. One after the other, torch's operators read and write the values sixteen times in a forward
and backward pass with a ReLU, here it is ten times.

    forward    mean and variance of x (one pass), y = relu((x - mean) · scale + shift + added) (another)
    backward   g = dy where ReLU passed;  Σ g and Σ g (x - mean) (one pass), dx and, for the summand, g (another)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.kernels.conv.memory import channels_last
from podium.kernels.eligibility import has_hooks, leave_to_torch, shown
from podium.kernels.jit.llvm import WIDTH
from podium.kernels.norm import batch_norm_loops as loops

#: values of a piece, so that it stays in a core's cache; and rows: with few, sums take as much memory as values, with
#: many, single precision loses digits
_PIECE, _LEAST_ROWS, _MOST_ROWS = 1 << 15, 4 * loops.ROWS, 2048
#: channels of a piece, where there is one sum for each
_CHANNELS = 256
#: fewer values are not worth the calls: measured with AVX-512, one and two threads
_LEAST_VALUES = 1 << 17


class BatchNorm(torch.autograd.Function):
    """Batch norm of channels-last images (n, c, h, w) with the statistics of this batch; then a sum and ReLU, if any.

    Also moves the running statistics, as the plain module does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, norm: nn.BatchNorm2d, relu: bool
    ) -> Tensor:
        rows, c = x.numel() // x.shape[1], x.shape[1]
        per_piece, num_pieces = _pieces(rows, c)
        factors = _factors(x, weight, bias, norm)
        y = torch.empty_like(x)
        ctx.adds, ctx.relu = added is not None, _relu(relu, added is not None)
        mask = torch.empty(x.numel() // WIDTH, dtype=_MASK) if ctx.relu == "kept" else None
        loops.normalised(adds=ctx.adds, relu=ctx.relu)(
            num_pieces, rows, c, per_piece, x, factors, _or_none(added), y, _or_none(mask)
        )
        ctx.save_for_backward(x, factors, mask)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, factors, mask = ctx.saved_tensors
        dy = channels_last(dy)
        rows, c = x.numel() // x.shape[1], x.shape[1]
        per_piece, num_pieces = _pieces(rows, c)
        word = _or_none(mask)
        partial = torch.empty(num_pieces, 2, c)
        loops.gradient_sums(relu=ctx.relu)(num_pieces, rows, c, per_piece, x, factors, dy, word, partial)
        of_weight, of_bias, of_sums = torch.empty(c), torch.empty(c), torch.empty(2, c)
        loops.gradient_factors()(-(-c // _CHANNELS), rows, c, num_pieces, partial, factors, of_sums, of_weight, of_bias)
        if not (ctx.needs_input_grad[0] or ctx.adds):
            return None, of_weight, of_bias, None, None, None
        dx = torch.empty_like(x)
        of_added = torch.empty_like(x) if ctx.adds else None
        loops.gradients(adds=ctx.adds, relu=ctx.relu)(
            num_pieces, rows, c, per_piece, x, factors, of_sums, dy, word, dx, _or_none(of_added)
        )
        return dx, of_weight, of_bias, of_added, None, None


_MASK = {8: torch.uint8, 16: torch.int16}[WIDTH]


def _relu(follows: bool, adds: bool) -> loops.Relu:
    """Return how the backward pass knows what ReLU passed."""
    if not follows:
        return "none"
    return "kept" if adds else "found"


def _or_none(tensor: Tensor | None) -> Tensor | int:
    """Return a tensor as a routine takes it."""
    return 0 if tensor is None else tensor


def _pieces(rows: int, c: int) -> tuple[int, int]:
    """Return the rows of a piece and the number of pieces, which depend on nothing but the shape."""
    per_piece = min(_MOST_ROWS, max(_LEAST_ROWS, _PIECE // c))
    return per_piece, -(-rows // per_piece)


def _factors(x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Return mean, 1 / standard deviation, scale and shift per channel (4, c), and move the running statistics."""
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    rows, c = x.numel() // x.shape[1], x.shape[1]
    per_piece, num_pieces = _pieces(rows, c)
    partial, factors = torch.empty(num_pieces, 3, c), torch.empty(4, c)
    loops.statistics()(num_pieces, rows, c, per_piece, x, partial)
    norm.num_batches_tracked.add_(1)
    loops.factors()(
        -(-c // _CHANNELS), rows, c, per_piece, num_pieces, partial, weight, bias, norm.running_mean, norm.running_var,
        factors, loops.bits(norm.eps), loops.bits(norm.momentum),
    )  # fmt: skip
    return factors


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain batch norm to the class below."""
    if type(module) is nn.BatchNorm2d:
        module.__class__ = BatchNorm2d


class BatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        if leave_to_torch(input) or not fits(self, input):
            return super().forward(input)
        return apply(self, input)


def fits(norm: nn.Module, x: Tensor) -> bool:
    """Return whether `apply` can do the work of this batch norm on x, and faster than torch."""
    return (
        isinstance(norm, BatchNorm2d)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and x.dim() == 4
        and x.shape[1] == norm.num_features
        and x.shape[1] % WIDTH == 0
        and x.numel() >= max(_LEAST_VALUES, 2 * x.shape[1])
    )


def apply(norm: nn.BatchNorm2d, x: Tensor, added: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Normalise x, and add `added` and apply ReLU if asked to."""
    if added is not None:
        added = channels_last(added)
    result: Tensor = BatchNorm.apply(channels_last(x), norm.weight, norm.bias, added, norm, relu)
    return result


class Step:
    """A batch norm and a ReLU."""

    num_modules = 2

    def __init__(self, norm: BatchNorm2d, relu: nn.ReLU) -> None:
        self._norm, self._relu = norm, relu

    def __call__(self, input: Tensor) -> Tensor:
        if has_hooks(self._norm) or has_hooks(self._relu) or not fits(self._norm, input):
            after: Tensor = self._relu(self._norm(input))
            return after
        return shown((self._norm, self._relu), apply(self._norm, input, relu=True))


def step(modules: Sequence[nn.Module]) -> Step | None:
    """Build a step from the first two modules if they are a batch norm and a ReLU."""
    if len(modules) >= 2 and type(modules[0]) is BatchNorm2d and type(modules[1]) is nn.ReLU:
        return Step(modules[0], modules[1])
    return None
