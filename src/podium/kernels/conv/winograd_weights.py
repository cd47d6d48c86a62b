"""The kernels of `winograd.py`, transformed for its products: U = G k Gᵀ, sums of taps in halves and quarters.

With torch's operators this is a copy and a small matrix product: 0.07 ms for mnist's second layer, where the whole
convolution of a micro-batch of 8 takes 0.2 ms; here it takes 0.03 ms, with the same additions in the same order.

    kernel (o, c, 3, 3), in memory (o, 3, 3, c); U (16, c, o), or (16, o, c) for the kernel rotated by 180°
"""

import functools

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.jit.llvm import FLOAT, INT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

Line = list[Value]


@functools.cache
def matrix() -> Tensor:
    """Return the (16, 9) matrix that transforms a kernel written as a row."""
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    return torch.kron(g, g)


def transformed(kernel: Tensor, backwards: bool = False) -> Tensor:
    """Return U; o and c are multiples of a vector's size."""
    o, c, _, _ = kernel.shape
    taps = kernel.permute(0, 2, 3, 1).contiguous()
    u = torch.empty((16, o, c) if backwards else (16, c, o))
    num_pieces = min(o // WIDTH, 4 * torch.get_num_threads())
    _routine(o, c, backwards)(num_pieces, taps, u)
    return u


@machine_code
def _routine(o: int, c: int, backwards: bool) -> Code:
    code = Code(num_arguments=2)
    taps, u = (code.pointer(address, FLOAT) for address in code.arguments)

    def loaded(out: Value, at: Value) -> Line:
        """Load the nine taps of an output, for the channels from `at` on."""
        first = code.plus(code.times(out, 9 * c), at)
        return [code.vector(taps, code.plus(first, number(tap * c)), WIDTH) for tap in range(9)]

    def store(values: Line, place: Value) -> None:
        for x, value in enumerate(values):
            code.store_vector(value, u, code.plus(place, number(x * o * c)))

    with code.every_piece() as piece:
        first, last = code.share(number(o // WIDTH), piece)
        with (
            code.loop(code.times(first, WIDTH), code.times(last, WIDTH), WIDTH) as out,
            code.loop(number(0), number(c), WIDTH) as at,
        ):
            rows = [(code.plus(out, number(i)), code.plus(at, number(i))) for i in range(WIDTH)]
            if backwards:
                for row, _ in rows:
                    store(_sums(code, loaded(row, at)[::-1]), code.plus(code.times(row, c), at))
            else:
                by_output = [loaded(row, at) for row, _ in rows]
                by_tap = [_transposed(code, [of_row[tap] for of_row in by_output]) for tap in range(9)]
                for i, (_, channel) in enumerate(rows):
                    store(_sums(code, [of_tap[i] for of_tap in by_tap]), code.plus(code.times(channel, o), out))
    return code


def _sums(code: Code, taps: Line) -> Line:
    """Return the 16 transformed values, each summed in the order of the taps and then scaled, which is exact."""
    found = []
    for row in matrix().tolist():
        used = [(tap, factor) for tap, factor in zip(taps, row, strict=True) if factor]
        total, scale = used[0]
        for tap, factor in used[1:]:
            total = code.ir.fadd(total, tap) if factor > 0 else code.ir.fsub(total, tap)
        found.append(total if scale == 1 else code.ir.fmul(total, code.spread(FLOAT(scale), WIDTH)))
    return found


def _transposed(code: Code, rows: Line) -> Line:
    """Transpose a square of values.

    Every pass interleaves the rows of both halves, which rotates the bits of a value's place (row, column) by one;
    after as many passes as a column has bits, row and column have changed places.
    """
    half = WIDTH // 2
    masks = [
        ir.Constant(ir.VectorType(INT, WIDTH), [start + k // 2 + k % 2 * WIDTH for k in range(WIDTH)])
        for start in (0, half)
    ]
    for _ in range(WIDTH.bit_length() - 1):
        rows = [code.ir.shuffle_vector(rows[i], rows[i + half], mask) for i in range(half) for mask in masks]
    return rows
