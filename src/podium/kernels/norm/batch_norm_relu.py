"""Batch norm, an optional summand, and ReLU as one operator, on channels-last values. Called by `kernels/fusing.py`.

Memory limits all of these: one after the other, torch's operators read and write the values eleven times in a forward
and backward pass with a sum and a ReLU; here it is seven times.

    forward    mean and variance of x (one pass), y = relu(x · scale + shift + added) (another)
    backward   g = dy where y > 0;  Σg and Σ g (x - mean) (one pass), dx = a g + b x + c and, for the summand, g

Sums are formed over pieces of rows in registers and combined in double precision. The division into pieces does not
depend on the number of threads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor, nn

from podium.kernels.conv.memory import channels_last
from podium.kernels.eligibility import has_hooks, shown
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

#: the most values of a piece, so that it stays in a core's cache; and rows: single precision loses digits beyond that
_PIECE, _MOST_ROWS = 1 << 16, 2048
#: fewer values are not worth the call
_LEAST_VALUES = 1 << 15


def fits(norm: nn.Module, x: Tensor) -> bool:
    """Return whether `NormRelu` can replace this batch norm in training, for a channels-last x (n, c, h, w)."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.dim() == 4
        and x.shape[1] % WIDTH == 0
        and x.numel() >= _LEAST_VALUES
    )


class NormRelu(torch.autograd.Function):
    """relu(batch norm of x + added), or without the sum if `added` is None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, norm: nn.BatchNorm2d
    ) -> Tensor:
        rows, c = x.numel() // x.shape[1], x.shape[1]
        mean, var = _statistics(x, rows, c)
        with torch.no_grad():
            _track(norm, mean, var, rows)
        inverse = torch.rsqrt(var + norm.eps)
        scale = weight.double() * inverse
        factors = torch.stack([scale, bias.double() - mean * scale]).float()
        y = torch.empty_like(x)
        _applied(_group(c), added is not None)(
            _num_pieces(rows, c), rows, c, _rows_of(c), x, factors, y, 0 if added is None else added
        )
        ctx.save_for_backward(x, y, weight, mean, inverse)
        ctx.adds = added is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, mean, inverse = ctx.saved_tensors
        rows, c = x.numel() // x.shape[1], x.shape[1]
        dy = dy.contiguous(memory_format=torch.channels_last)
        num_pieces = _num_pieces(rows, c)
        partial = torch.empty(num_pieces, 2, c)
        _gradient_sums(_group(c))(num_pieces, rows, c, _rows_of(c), x, y, dy, mean.float(), partial)
        total, moment = partial.sum(0, dtype=torch.float64)  # Σg, Σ g (x - mean)
        scale = weight.double() * inverse
        of_x = -scale * inverse * inverse * moment / rows
        factors = torch.stack([scale, of_x, -scale * total / rows - of_x * mean]).float()
        dx = torch.empty_like(x)
        of_added = torch.empty_like(x) if ctx.adds else None
        _gradients(_group(c), ctx.adds)(
            num_pieces, rows, c, _rows_of(c), x, y, dy, factors, dx, 0 if of_added is None else of_added
        )
        return dx, (inverse * moment).to(weight.dtype), total.to(weight.dtype), of_added, None


def apply(norm: nn.BatchNorm2d, x: Tensor, added: Tensor | None = None) -> Tensor:
    """Normalise x, add `added` if given, and apply ReLU."""
    result: Tensor = NormRelu.apply(channels_last(x), norm.weight, norm.bias, added, norm)
    return result


class Step:
    """A batch norm and a ReLU."""

    num_modules = 2

    def __init__(self, norm: nn.BatchNorm2d, relu: nn.ReLU) -> None:
        self._norm, self._relu = norm, relu

    def __call__(self, input: Tensor) -> Tensor:
        if has_hooks(self._norm) or has_hooks(self._relu) or not fits(self._norm, input):
            return self._relu(self._norm(input))
        return shown((self._norm, self._relu), apply(self._norm, input))


def step(modules: Sequence[nn.Module]) -> Step | None:
    """Build a step from the first two modules if they are a batch norm and a ReLU."""
    if len(modules) >= 2 and type(modules[0]) is nn.BatchNorm2d and type(modules[1]) is nn.ReLU:
        return Step(modules[0], modules[1])
    return None


def _statistics(x: Tensor, rows: int, c: int) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance per channel, in double precision.

    Each piece sums differences from its own first row, so that a mean far from zero costs no precision.
    """
    num_pieces, per_piece = _num_pieces(rows, c), _rows_of(c)
    partial = torch.empty(num_pieces, 3, c)
    _sums(_group(c))(num_pieces, rows, c, per_piece, x, partial)
    counts = torch.full((num_pieces, 1), float(per_piece), dtype=torch.float64)
    counts[-1] = rows - (num_pieces - 1) * per_piece
    first, total, squares = partial.double().unbind(1)
    means = first + total / counts
    mean = (means * counts).sum(0) / rows
    spread = squares - total * total / counts + counts * (means - mean) ** 2
    return mean, (spread.sum(0) / rows).clamp_(min=0.0)


def _track(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, rows: int) -> None:
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.float(), norm.momentum)
    norm.running_var.lerp_((var * (rows / max(1, rows - 1))).float(), norm.momentum)


def _group(c: int) -> int:
    """Return the number of channels whose sums are in registers at the same time."""
    return next(size for size in (32, 16, 8) if c % size == 0)


def _rows_of(c: int) -> int:
    return min(_MOST_ROWS, max(1, _PIECE // c))


def _num_pieces(rows: int, c: int) -> int:
    return -(-rows // _rows_of(c))


# --- routines: rows × c values, c a multiple of `group`; a piece is a number of rows ----------------------------------


def _start(num_arguments: int) -> tuple[Code, list[Value]]:
    code = Code(num_arguments=num_arguments)
    return code, code.arguments


def _piece_rows(code: Code, piece: Value, rows: Value, per_piece: Value) -> tuple[Value, Value]:
    """Return (first row, number of rows) of a piece."""
    first = code.times(piece, per_piece)
    left = code.ir.sub(rows, first)
    fewer = code.ir.icmp_signed("<", left, per_piece)
    return first, code.ir.select(fewer, left, per_piece)


def _at(code: Code, row: Value, c: Value, channel: Value, lane: int) -> Value:
    return code.plus(code.plus(code.times(row, c), channel), number(lane))


def _zero() -> Value:
    return ir.Constant(ir.VectorType(FLOAT, WIDTH), [0.0] * WIDTH)


def _lanes(group: int) -> range:
    return range(0, group, WIDTH)


def _store_sums(code: Code, out: Value, piece: Value, c: Value, channel: Value, kinds: list[list[Value]]) -> None:
    """Store sums in out[piece, kind, channel …] of (pieces, kinds, c)."""
    for kind, vectors in enumerate(kinds):
        row = code.plus(code.times(piece, len(kinds)), number(kind))
        for lane, vector in enumerate(vectors):
            code.store_vector(vector, out, _at(code, row, c, channel, lane * WIDTH))


@machine_code
def _sums(group: int) -> Code:
    """Write the routine for partial (pieces, 3, c): the first row, sums of differences from it and of their squares."""
    code, (rows, c, per_piece, x, partial) = _start(5)
    of_x, out = code.pointer(x, FLOAT), code.pointer(partial, FLOAT)
    with code.every_piece() as piece:
        first, num = _piece_rows(code, piece, rows, per_piece)
        with code.loop(number(0), c, group) as channel:
            origin = [code.vector(of_x, _at(code, first, c, channel, lane), WIDTH) for lane in _lanes(group)]

            def turn(index: Value, values: list[Value]) -> list[Value]:
                half = len(values) // 2
                row = code.plus(first, index)
                found = [code.vector(of_x, _at(code, row, c, channel, lane), WIDTH) for lane in _lanes(group)]
                apart = [code.ir.fsub(value, zero) for value, zero in zip(found, origin, strict=True)]
                sums = [code.ir.fadd(total, d) for total, d in zip(values[:half], apart, strict=True)]
                squares = [code.multiply_add(d, d, total) for total, d in zip(values[half:], apart, strict=True)]
                return sums + squares

            sums = code.fold(num, [_zero()] * (2 * len(origin)), turn)
            kept = [origin, sums[: len(origin)], sums[len(origin) :]]
            _store_sums(code, out, piece, c, channel, kept)
    return code


@machine_code
def _applied(group: int, adds: bool) -> Code:
    """Write the routine for y = relu(x · factors[0] + factors[1] + added)."""
    code, (rows, c, per_piece, x, factors, y, added) = _start(7)
    of_x, by, out, more = (code.pointer(address, FLOAT) for address in (x, factors, y, added))
    with code.every_piece() as piece:
        first, num = _piece_rows(code, piece, rows, per_piece)
        last = code.plus(first, num)
        with code.loop(first, last) as row, code.loop(number(0), c, group) as channel:
            for lane in _lanes(group):
                at = _at(code, row, c, channel, lane)
                scale = code.vector(by, _at(code, number(0), c, channel, lane), WIDTH)
                shift = code.vector(by, _at(code, number(1), c, channel, lane), WIDTH)
                value = code.multiply_add(code.vector(of_x, at, WIDTH), scale, shift)
                if adds:
                    value = code.ir.fadd(value, code.vector(more, at, WIDTH))
                # not greater than zero, or NaN: NaN stays, as with torch's ReLU
                below = code.ir.fcmp_ordered("<=", value, _zero())
                code.store_vector(code.ir.select(below, _zero(), value), out, at)
    return code


def _passed(code: Code, y: Value, dy: Value, at: Value) -> Value:
    """Return the gradient where ReLU passed the value, zero elsewhere."""
    below = code.ir.fcmp_ordered("<=", code.vector(y, at, WIDTH), _zero())
    return code.ir.select(below, _zero(), code.vector(dy, at, WIDTH))


@machine_code
def _gradient_sums(group: int) -> Code:
    """Write the routine for partial (pieces, 2, c): Σg and Σ g (x - mean)."""
    code, (rows, c, per_piece, x, y, dy, mean, partial) = _start(8)
    of_x, of_y, of_dy, means, out = (code.pointer(address, FLOAT) for address in (x, y, dy, mean, partial))
    with code.every_piece() as piece:
        first, num = _piece_rows(code, piece, rows, per_piece)
        with code.loop(number(0), c, group) as channel:
            centre = [code.vector(means, _at(code, number(0), c, channel, lane), WIDTH) for lane in _lanes(group)]

            def turn(index: Value, values: list[Value]) -> list[Value]:
                half = len(values) // 2
                row = code.plus(first, index)
                sums, moments = [], []
                for place, lane in enumerate(_lanes(group)):
                    at = _at(code, row, c, channel, lane)
                    passed = _passed(code, of_y, of_dy, at)
                    apart = code.ir.fsub(code.vector(of_x, at, WIDTH), centre[place])
                    sums.append(code.ir.fadd(values[place], passed))
                    moments.append(code.multiply_add(passed, apart, values[half + place]))
                return sums + moments

            sums = code.fold(num, [_zero()] * (2 * len(centre)), turn)
            _store_sums(code, out, piece, c, channel, [sums[: len(centre)], sums[len(centre) :]])
    return code


@machine_code
def _gradients(group: int, adds: bool) -> Code:
    """Write the routine for dx = factors[0] · g + factors[1] · x + factors[2]; the summand's gradient is g."""
    code, (rows, c, per_piece, x, y, dy, factors, dx, of_added) = _start(9)
    of_x, of_y, of_dy, by, out, more = (code.pointer(address, FLOAT) for address in (x, y, dy, factors, dx, of_added))
    with code.every_piece() as piece:
        first, num = _piece_rows(code, piece, rows, per_piece)
        last = code.plus(first, num)
        with code.loop(first, last) as row, code.loop(number(0), c, group) as channel:
            for lane in _lanes(group):
                at = _at(code, row, c, channel, lane)
                of_g, of_value, rest = (
                    code.vector(by, _at(code, number(kind), c, channel, lane), WIDTH) for kind in range(3)
                )
                passed = _passed(code, of_y, of_dy, at)
                value = code.multiply_add(code.vector(of_x, at, WIDTH), of_value, rest)
                code.store_vector(code.multiply_add(passed, of_g, value), out, at)
                if adds:
                    code.store_vector(passed, more, at)
    return code
