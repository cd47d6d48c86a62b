"""What Winograd's convolutions do with one tile or one kernel: sums and multiples, all of them along lines of a square.
Used by `winograd_routines.py` and `winograd_weights.py`.

F(2 × 2, 3 × 3) evaluates at the points 0, 1, -1 and ∞, which takes sums only. F(4 × 4, 3 × 3) evaluates at 0, ± 5/8,
± 3/2 and ∞. The usual 0, ± 1, ± 2 and ∞ would save a few multiplications and make errors four times as large: the
largest against float64, as a share of the largest output, is 5.9e-6 with these and 64 channels, 1.3e-6 with ours, and
0.9e-6 for the direct method of torch's library. A point and about the inverse of another keep all powers near 1, and
every factor of an image or an output is exact.

    a, b    the points; a line of `side` outputs needs `side + 2` inputs and as many products
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from podium.kernels.jit.llvm import Code, Value
from podium.kernels.jit.vector_ops import constant

Line = list[Value]
_A, _B = 5 / 8, 3 / 2
#: Rows of products that are computed together: 36 values are more than there are registers. What a pair of rows needs
#: is read again for the next one.
PARTS: dict[int, Sequence[Sequence[int]]] = {2: (range(4),), 4: ((0, 5), (1, 2), (3, 4))}


def both_ways(lines: list[Line], transform: Callable[[Line], Line], part: Sequence[int]) -> list[tuple[int, Value]]:
    """Transform the columns and then the rows of a square of values, given row by row.

    Return the rows in `part` of the transformed square: each value with its number. The rest is not computed.
    """
    columns = [transform(list(column)) for column in zip(*lines, strict=True)]
    found = []
    for i in part:
        row = transform([column[i] for column in columns])
        found += [(i * len(row) + j, value) for j, value in enumerate(row)]
    return found


def products(code: Code, side: int, d: Line) -> Line:
    """Compute Bᵀ d: the inputs of a line, as factors of its products."""
    build = code.ir
    if side == 2:
        return [build.fsub(d[0], d[2]), build.fadd(d[1], d[2]), build.fsub(d[2], d[1]), build.fsub(d[1], d[3])]
    both, first = _A**2 + _B**2, _A**2 * _B**2
    found = [_sum(code, (first, d[0]), (-both, d[2]), (1, d[4]))]
    for point, other in ((_A, -(_B**2)), (_B, -(_A**2))):
        even, odd = _sum(code, (other, d[2]), (1, d[4])), _sum(code, (other, d[1]), (1, d[3]))
        found += [_sum(code, (point, odd), (1, even)), _sum(code, (-point, odd), (1, even))]
    return [*found, _sum(code, (first, d[1]), (-both, d[3]), (1, d[5]))]


def outputs(code: Code, side: int, m: Line) -> Line:
    """Compute Aᵀ m: a line's outputs, given its products."""
    build = code.ir
    if side == 2:
        return [build.fadd(build.fadd(m[0], m[1]), m[2]), build.fsub(build.fsub(m[1], m[2]), m[3])]
    even_a, odd_a = build.fadd(m[1], m[2]), build.fsub(m[1], m[2])
    even_b, odd_b = build.fadd(m[3], m[4]), build.fsub(m[3], m[4])
    return [
        build.fadd(m[0], build.fadd(even_a, even_b)),
        _sum(code, (_A, odd_a), (_B, odd_b)),
        _sum(code, (_A**2, even_a), (_B**2, even_b)),
        _sum(code, (_A**3, odd_a), (_B**3, odd_b), (1, m[5])),
    ]


def back_to_products(code: Code, side: int, g: Line) -> Line:
    """Compute A g: the gradients of a line's products, given those of its outputs."""
    build = code.ir
    if side == 2:
        return [g[0], build.fadd(g[0], g[1]), build.fsub(g[0], g[1]), build.fneg(g[1])]
    found = [g[0]]
    for point in (_A, _B):
        even, odd = _sum(code, (point**2, g[2]), (1, g[0])), _sum(code, (point**2, g[3]), (1, g[1]))
        found += [_sum(code, (point, odd), (1, even)), _sum(code, (-point, odd), (1, even))]
    return [*found, g[3]]


def weights(code: Code, side: int, k: Line) -> Line:
    """Compute G k: the weights of a line, as factors of its products."""
    rows = _matrix(side)
    return [_sum(code, *((factor, tap) for factor, tap in zip(row, k, strict=True) if factor)) for row in rows]


def back_to_weights(code: Code, side: int, u: Line) -> Line:
    """Compute Gᵀ u: the gradients of a line's weights, given those of the factors."""
    columns = zip(*_matrix(side), strict=True)
    return [_sum(code, *((factor, value) for factor, value in zip(col, u, strict=True) if factor)) for col in columns]


@functools.cache
def matrix(side: int) -> Tensor:
    """Return the ((side + 2)², 9) matrix that transforms a kernel written as a row."""
    g = torch.tensor(_matrix(side), dtype=torch.float64)
    return torch.kron(g, g).float()


def _matrix(side: int) -> list[list[float]]:
    """Return G."""
    if side == 2:
        return [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]
    of_zero = 1 / (_A**2 * _B**2)
    of_a, of_b = 1 / (2 * _A**2 * (_A**2 - _B**2)), 1 / (2 * _B**2 * (_B**2 - _A**2))
    rows = [[of_zero, 0.0, 0.0]]
    for point, scale in ((_A, of_a), (-_A, of_a), (_B, of_b), (-_B, of_b)):
        rows.append([scale, scale * point, scale * point**2])
    return [*rows, [0.0, 0.0, 1.0]]


def _sum(code: Code, *terms: tuple[float, Value]) -> Value:
    """Add multiples, the last one first."""
    factor, value = terms[-1]
    total = value if factor == 1 else code.ir.fmul(constant(factor), value)
    for factor, value in reversed(terms[:-1]):
        total = code.multiply_add(constant(factor), value, total)
    return total
