"""Linear layers, and the matrix products of other kernels, by machine code instead of MKL. Applied to models by
`kernels/install.py`; other kernels use it through `multiply.py`.

MKL uses AVX-512 only on processors of its own maker: on an AMD EPYC that has it, products of 1,024 × 768 by 768 × 768
reach 113 GFLOP/s on one core, here 254. oneDNN is as fast (252), but torch offers it for one of the three products of a
layer only: for its gradients, matrices have to be transposed first, and with 2,048 × 256 by 256 × 8,192 it reaches 116
for that of the weight, here 215. So `registry.py` lets this kernel in on such processors.

    x (m, k), weight (n, k) as in a linear layer; left (m, k), right (k, n) as in a product
"""

from typing import Any

import torch
from torch import Tensor, nn

from podium.kernels.eligibility import leave_to_torch
from podium.kernels.jit.matrices import multiply
from podium.kernels.multiply import product

#: multiplications from which it pays, and the least inner size and number of columns
LEAST_MULTIPLICATIONS = 1 << 19
_LEAST_SIDE = 8


def is_large(m: int, k: int, n: int) -> bool:
    """Return whether a product of (m, k) and (k, n) pays."""
    return m * k * n >= LEAST_MULTIPLICATIONS and min(k, n) >= _LEAST_SIDE


def multiplied(left: Tensor, right: Tensor, start: Tensor | None, out: Tensor | None) -> Tensor:
    """Return left · right, plus `start`: a row, or `out` itself; in `out`, or in a new matrix."""
    if out is None:
        out = left.new_empty(len(left), right.shape[1])
    multiply(_dense(left), _dense(right), out, start)
    return out


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix whose elements are adjacent along an axis."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the layer's products are computed here."""
    if leave_to_torch(x) or weight.dtype != x.dtype or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        return False
    return x.numel() > 0 and is_large(x.numel() // x.shape[-1], weight.shape[1], len(weight))


class LinearLayer(torch.autograd.Function):
    """A product of x (…, k) with a weight (n, k), plus a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        output = x.new_empty(*x.shape[:-1], len(weight))
        multiplied(rows, weight.t(), bias, output.view(-1, len(weight)))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, len(weight))
        return (
            product(flat, weight).view(*grad.shape[:-1], -1) if wants_x else None,
            product(flat.t(), rows) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


def offer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return what `torch.nn.functional.linear` would, or None where the work is left to it."""
    if not fits(x, weight):
        return None
    result: Tensor = LinearLayer.apply(x, weight, bias)
    return result


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain linear layer to the class below."""
    if type(module) is nn.Linear:
        module.__class__ = _Linear


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        found = offer(input, self.weight, self.bias)
        return super().forward(input) if found is None else found
