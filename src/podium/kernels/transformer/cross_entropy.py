"""Summed cross-entropy over many classes, computed along with its gradient. Fills the slot of `layers/loss.py`.

torch's operators read and write the logits seven times; here they are read from memory once and overwritten by their
gradient, row by row while a row is in a core's cache.

    loss = Σ ln Σ e^(x - m) + m - x[target]     gradient = e^(x - m) / Σ e^(x - m) - (1 at the target)

    logits (N, V), targets (N,)
"""

from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.eligibility import leave_to_torch
from podium.kernels.jit.llvm import FLOAT, INT, LONG, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import across, constant, exponential, larger

#: fewer classes or values are left to torch
_LEAST_CLASSES, LEAST_VALUES = 64, 1 << 16
#: vectors processed at a time
_TOGETHER = 4
_STEP = _TOGETHER * WIDTH
_LOWEST = -3e38


def fits(logits: Tensor) -> bool:
    """Return whether `CrossEntropy` can take these logits in training."""
    if leave_to_torch(logits) or not logits.requires_grad or logits.dim() != 2:
        return False
    return logits.shape[1] >= _LEAST_CLASSES and logits.numel() >= LEAST_VALUES


class CrossEntropy(torch.autograd.Function):
    """The sum over rows, except those whose target is `ignored`. The logits must not be used afterwards."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        num_rows, num_classes = logits.shape
        grad = logits.contiguous()
        used = target != ignored
        _check(target, used, num_classes)
        found = torch.empty(num_rows, 3)  # the largest logit, the sum of exponentials, the target's logit
        at = torch.where(used, target, -1).long().contiguous()
        _routine(num_classes)(num_rows, grad, at, found)
        largest, total, wanted = found.double().unbind(1)
        losses = torch.where(used, total.log() + (largest - wanted), 0.0)
        ctx.save_for_backward(grad)
        return losses.sum().float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad if factor.item() == 1.0 else grad * factor, None, None


def offer(logits: Tensor, target: Tensor, ignored: int) -> Tensor | None:
    """Return the sum, or None if it is left to torch."""
    if not fits(logits):
        return None
    loss: Tensor = CrossEntropy.apply(logits, target, ignored)
    return loss


def _check(target: Tensor, used: Tensor, num_classes: int) -> None:
    """Check that targets are in range, since the routine writes where they point."""
    if bool((used & ((target < 0) | (target >= num_classes))).any()):
        raise IndexError(f"a target is not among the {num_classes} classes")


@machine_code
def _routine(num_classes: int) -> Code:
    """Write the routine, in which a piece is a row. `targets`: -1 for rows to leave out, whose gradient is zero."""
    code = Code(num_arguments=3)
    build = code.ir
    logits, targets, found = code.arguments
    rest = num_classes % _STEP
    whole = num_classes - rest
    tails = [(at, min(WIDTH, num_classes - at)) for at in range(whole, num_classes, WIDTH)]
    with code.every_piece() as row:
        line = code.pointer(logits, FLOAT, code.times(row, num_classes))
        results = code.pointer(found, FLOAT, code.times(row, 3))
        target = code.load(code.pointer(targets, LONG), row)
        used = build.icmp_signed(">=", target, number(0))
        at_target = build.select(used, target, number(0))
        wanted = code.load(line, at_target)

        def places(step: Value) -> list[Value]:
            return [code.plus(code.times(step, _STEP), number(k * WIDTH)) for k in range(_TOGETHER)]

        def most(step: Value, values: list[Value]) -> list[Value]:
            found = [code.vector(line, at, WIDTH) for at in places(step)]
            return [larger(code, x, value) for x, value in zip(found, values, strict=True)]

        num_steps = number(whole // _STEP)
        best = code.fold(num_steps, [constant(_LOWEST)] * _TOGETHER, most)
        ends = [_load_tail(code, line, at, size) for at, size in tails]
        for x in ends:
            best[0] = larger(code, x, best[0])
        for k in range(1, _TOGETHER):
            best[0] = larger(code, best[0], best[k])
        largest = across(code, best[0], lambda a, b: larger(code, a, b))
        apart = code.spread(largest, WIDTH)

        def summed(step: Value, sums: list[Value]) -> list[Value]:
            following = []
            for at, total in zip(places(step), sums, strict=True):
                power = exponential(code, build.fsub(code.vector(line, at, WIDTH), apart))
                code.store_vector(power, line, at)
                following.append(build.fadd(total, power))
            return following

        sums = code.fold(num_steps, [constant(0.0)] * _TOGETHER, summed)
        ends = [exponential(code, build.fsub(x, apart)) for x in ends]
        for x in ends:
            sums[0] = build.fadd(sums[0], x)
        total = across(code, build.fadd(build.fadd(*sums[:2]), build.fadd(*sums[2:])), build.fadd)
        inverse = build.fdiv(FLOAT(1.0), total)
        factor = code.spread(build.select(used, inverse, FLOAT(0.0)), WIDTH)
        with code.loop(number(0), number(whole), WIDTH) as at:
            code.store_vector(build.fmul(code.vector(line, at, WIDTH), factor), line, at)
        for x, (at, size) in zip(ends, tails, strict=True):
            _store_tail(code, build.fmul(x, factor), line, at, size)
        one = build.select(used, FLOAT(1.0), FLOAT(0.0))
        code.store(build.fsub(code.load(line, at_target), one), line, at_target)
        for k, value in enumerate((largest, total, wanted)):
            code.store(value, results, number(k))
    return code


def _load_tail(code: Code, line: Value, at: int, size: int) -> Value:
    """Load a vector whose places beyond the row are minus infinity."""
    if size == WIDTH:
        return code.vector(line, number(at), WIDTH)
    vector = constant(float("-inf"))
    for k in range(size):
        vector = code.ir.insert_element(vector, code.load(line, number(at + k)), ir.Constant(INT, k))
    return vector


def _store_tail(code: Code, vector: Value, line: Value, at: int, size: int) -> None:
    if size == WIDTH:
        code.store_vector(vector, line, number(at))
        return
    for k in range(size):
        code.store(code.ir.extract_element(vector, ir.Constant(INT, k)), line, number(at + k))
