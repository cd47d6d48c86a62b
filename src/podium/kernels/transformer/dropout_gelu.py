"""Dropout, and GELU by a hyperbolic tangent, each in one pass over memory. Applied to models by `kernels/install.py`.

torch draws the random numbers of dropout one by one on one core. Here they are hashes of a seed and a place, computed
again in the backward pass instead of kept; the seed comes from torch's default generator.

    gelu(x) = x σ(u), u = 2 √(2/π) (x + a x³)     gelu'(x) = σ(u) + x σ(u) (1 - σ(u)) u'
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from podium.kernels.eligibility import leave_to_torch
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import constant, draw_seed, exponential, kept, line_key, threshold

#: values that one thread processes at a time
_LINE = 1 << 12
#: fewer are not worth the call
LEAST_VALUES = 1 << 14
_CUBE = 0.044715
_SCALE = 2 * math.sqrt(2 / math.pi)
_MOST_POWER = 87.0


def fits(x: Tensor) -> bool:
    """Return whether the operators here can take x, in single precision on a CPU."""
    return x.numel() >= LEAST_VALUES and x.numel() % WIDTH == 0


class Dropout(torch.autograd.Function):
    """Dropout: a random share of the values becomes zero, and the others are divided by the share that is kept."""

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
    """GELU, approximated by a hyperbolic tangent."""

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
    """Write the whole routine: `work(line, place in it, place among all values)`, vector by vector."""
    with code.every_piece() as line:
        first = code.times(line, _LINE)
        left = code.ir.sub(num_values, first)
        size = code.ir.select(code.ir.icmp_signed("<", left, number(_LINE)), left, number(_LINE))
        with code.loop(number(0), size, WIDTH) as at:
            work(line, at, code.plus(first, at))


@machine_code
def _dropout(share: float) -> Code:
    code = Code(num_arguments=4)
    num_values, x, y, seed = code.arguments
    of_x, out = code.pointer(x, FLOAT), code.pointer(y, FLOAT)

    def work(line: Value, at: Value, place: Value) -> None:
        stays = kept(code, line_key(code, seed, line), at, threshold(share))
        value = code.ir.fmul(code.vector(of_x, place, WIDTH), constant(1 / (1 - share)))
        code.store_vector(code.ir.select(stays, value, constant(0.0)), out, place)

    _every_vector(code, num_values, work)
    return code


def _sigmoid(code: Code, x: Value) -> tuple[Value, Value]:
    """Return σ(u) and x²."""
    build = code.ir
    square = build.fmul(x, x)
    inner = build.fmul(x, code.multiply_add(square, constant(-_SCALE * _CUBE), constant(-_SCALE)))  # -u
    too_large = build.fcmp_ordered(">", inner, constant(_MOST_POWER))
    power = exponential(code, build.select(too_large, constant(_MOST_POWER), inner))
    return build.fdiv(constant(1.0), build.fadd(power, constant(1.0))), square


@machine_code
def _gelu() -> Code:
    code = Code(num_arguments=3)
    num_values, x, y = code.arguments
    of_x, out = code.pointer(x, FLOAT), code.pointer(y, FLOAT)

    def work(line: Value, at: Value, place: Value) -> None:
        value = code.vector(of_x, place, WIDTH)
        code.store_vector(code.ir.fmul(value, _sigmoid(code, value)[0]), out, place)

    _every_vector(code, num_values, work)
    return code


@machine_code
def _gelu_gradient() -> Code:
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
    return code


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain layer to one of the classes below."""
    faster = {nn.Dropout: _Dropout, nn.GELU: _Gelu}.get(type(module))
    if faster is not None:
        module.__class__ = faster


class _Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        plain = not self.training or self.inplace or not 0 < self.p < 1
        if plain or leave_to_torch(input) or not fits(input):
            return super().forward(input)
        dropped: Tensor = Dropout.apply(input, self.p)
        return dropped


class _Gelu(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        if self.approximate != "tanh" or leave_to_torch(input) or not fits(input):
            return super().forward(input)
        activated: Tensor = Gelu.apply(input)
        return activated
