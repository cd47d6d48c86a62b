"""Dropout, and GELU by a hyperbolic tangent, each in one pass over memory. Called by `transformers.py`.

torch draws the chances of dropout one by one on one core. Here they are hashes of a seed and a place, made again in the
backward pass instead of kept; the seed comes from torch's default generator.

    gelu(x) = x σ(u), u = 2 √(2/π) (x + a x³)     gelu'(x) = σ(u) + x σ(u) (1 - σ(u)) u'
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.engine.machine_code import FLOAT, WIDTH, Code, Routine, Value, number
from podium.engine.vectors import constant, draw_seed, exponential, kept, line_key, threshold

#: values that one thread works on at a time
_LINE = 1 << 12
#: fewer are not worth the call
_LEAST_VALUES = 1 << 14
_CUBE = 0.044715
_SCALE = 2 * math.sqrt(2 / math.pi)
_MOST_POWER = 87.0


def fits(x: Tensor) -> bool:
    """Whether the operators here can take x, in single precision on a CPU."""
    return x.numel() >= _LEAST_VALUES and x.numel() % WIDTH == 0


class Dropout(torch.autograd.Function):
    """Zeroes a share of the values by chance, and divides the others by what is left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share, ctx.seed = share, draw_seed()
        return _dropped_out(x, ctx.share, ctx.seed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _dropped_out(grad, ctx.share, ctx.seed), None


def _dropped_out(x: Tensor, share: float, seed: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _dropout(share)(_num_lines(x), x.numel(), x, y, seed)
    return y


class Gelu(torch.autograd.Function):
    """With the approximation by a hyperbolic tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _gelu()(_num_lines(x), x.numel(), x, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _gelu_gradient()(_num_lines(x), x.numel(), x, grad.contiguous(), dx)
        return dx


def _num_lines(x: Tensor) -> int:
    return -(-x.numel() // _LINE)


def _every_vector(code: Code, num_values: Value, work: Callable[[Value, Value, Value], None]) -> None:
    """Writes the whole routine: `work(line, place in it, place among all values)`, vector after vector."""
    with code.every_piece() as line:
        first = code.times(line, _LINE)
        left = code.ir.sub(num_values, first)
        size = code.ir.select(code.ir.icmp_signed("<", left, number(_LINE)), left, number(_LINE))
        with code.loop(number(0), size, WIDTH) as at:
            work(line, at, code.plus(first, at))


@functools.cache
def _dropout(share: float) -> Routine:
    code = Code(num_arguments=4)
    num_values, x, y, seed = code.arguments
    of_x, out = code.pointer(x, FLOAT), code.pointer(y, FLOAT)

    def work(line: Value, at: Value, place: Value) -> None:
        stays = kept(code, line_key(code, seed, line), at, threshold(share))
        value = code.ir.fmul(code.vector(of_x, place, WIDTH), constant(1 / (1 - share)))
        code.store_vector(code.ir.select(stays, value, constant(0.0)), out, place)

    _every_vector(code, num_values, work)
    return Routine(code)


def _sigmoid(code: Code, x: Value) -> tuple[Value, Value]:
    """σ(u), and x²"""
    build = code.ir
    square = build.fmul(x, x)
    inner = build.fmul(x, code.multiply_add(square, constant(-_SCALE * _CUBE), constant(-_SCALE)))  # -u
    too_large = build.fcmp_ordered(">", inner, constant(_MOST_POWER))
    power = exponential(code, build.select(too_large, constant(_MOST_POWER), inner))
    return build.fdiv(constant(1.0), build.fadd(power, constant(1.0))), square


@functools.cache
def _gelu() -> Routine:
    code = Code(num_arguments=3)
    num_values, x, y = code.arguments
    of_x, out = code.pointer(x, FLOAT), code.pointer(y, FLOAT)

    def work(line: Value, at: Value, place: Value) -> None:
        value = code.vector(of_x, place, WIDTH)
        code.store_vector(code.ir.fmul(value, _sigmoid(code, value)[0]), out, place)

    _every_vector(code, num_values, work)
    return Routine(code)


@functools.cache
def _gelu_gradient() -> Routine:
    code = Code(num_arguments=4)
    num_values, x, dy, dx = code.arguments
    of_x, of_dy, out = (code.pointer(address, FLOAT) for address in (x, dy, dx))
    build = code.ir

    def work(line: Value, at: Value, place: Value) -> None:
        value = code.vector(of_x, place, WIDTH)
        share, square = _sigmoid(code, value)
        slope = code.multiply_add(square, constant(3 * _SCALE * _CUBE), constant(_SCALE))
        rest = build.fsub(constant(1.0), share)
        moved = build.fmul(build.fmul(value, share), build.fmul(rest, slope))
        grad = build.fmul(code.vector(of_dy, place, WIDTH), build.fadd(share, moved))
        code.store_vector(grad, out, place)

    _every_vector(code, num_values, work)
    return Routine(code)
