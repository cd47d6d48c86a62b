"""The kernels of `winograd.py`, transformed for its products: U = G k Gᵀ.

With torch's operators this is a copy and a small matrix product: 0.07 ms for mnist's second layer, where the whole
convolution of a micro-batch of 8 takes 0.2 ms.

    kernel (o, c, 3, 3), in memory (o, 3, 3, c); U: (c, o) for each of the products, in panels (see
    `winograd_products.py`); (o, c) for the kernel rotated by 180°
"""

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.conv.winograd_products import panel_place
from podium.kernels.conv.winograd_tiles import Line, both_ways, weights
from podium.kernels.jit.llvm import FLOAT, INT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code


def transformed(kernel: Tensor, side: int, backwards: bool = False) -> Tensor:
    """Return U for tiles of side × side outputs; o and c are multiples of a vector's size."""
    o, c, _, _ = kernel.shape
    taps = kernel.permute(0, 2, 3, 1).contiguous()
    u = torch.empty(((side + 2) ** 2, o * c))
    num_pieces = min(o // WIDTH, 4 * torch.get_num_threads())
    _routine(o, c, side, backwards)(num_pieces, taps, u)
    return u


@machine_code
def _routine(o: int, c: int, side: int, backwards: bool) -> Code:
    code = Code(num_arguments=2)
    taps, u = (code.pointer(address, FLOAT) for address in code.arguments)

    def loaded(out: Value, at: Value) -> Line:
        """Load the nine taps of an output, for the channels from `at` on."""
        first = code.plus(code.times(out, 9 * c), at)
        return [code.vector(taps, code.plus(first, number(tap * c)), WIDTH) for tap in range(9)]

    def store(taps: Line, place: Value) -> None:
        square = [taps[:3], taps[3:6], taps[6:]]
        for x, value in both_ways(square, lambda line: weights(code, side, line), range(side + 2)):
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
                    store(loaded(row, at)[::-1], panel_place(code, o, c, row, at))
            else:
                by_output = [loaded(row, at) for row, _ in rows]
                by_tap = [_transposed(code, [of_row[tap] for of_row in by_output]) for tap in range(9)]
                for i, (_, channel) in enumerate(rows):
                    store([of_tap[i] for of_tap in by_tap], panel_place(code, c, o, channel, out))
    return code


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
