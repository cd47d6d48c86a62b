"""The kernels of `winograd.py`, transformed for its products, U = G k Gᵀ, and their gradients, Gᵀ dU G.

With torch's operators this is a copy and a small matrix product: 0.07 ms for mnist's second layer, where the whole
convolution of a micro-batch of 8 takes 0.2 ms.

    kernel (o, c, 3, 3), in memory (o, 3, 3, c); U: (c, o) for each of the products, in panels (see
    `winograd_products.py`); (o, c) for the kernel rotated by 180°
"""

import functools

import torch
from torch import Tensor

from podium.kernels.conv.winograd_products import apart, panel_place
from podium.kernels.conv.winograd_transforms import Line, back_to_weights, both_ways, weights
from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import scratch_arrays, scratch_size, transposed


def transformed(kernel: Tensor, side: int, backwards: bool = False) -> Tensor:
    """Return U for tiles of side × side outputs; o and c are multiples of a vector's size."""
    o, c, _, _ = kernel.shape
    taps = kernel.permute(0, 2, 3, 1).contiguous()
    u = torch.empty((side + 2) ** 2, apart(c * o))
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
            code.store_vector(value, u, code.plus(place, number(x * apart(c * o))))

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
                by_tap = [transposed(code, [of_row[tap] for of_row in by_output]) for tap in range(9)]
                for i, (_, channel) in enumerate(rows):
                    store([of_tap[i] for of_tap in by_tap], panel_place(code, c, o, channel, out))
    return code


def gradient(sums: Tensor, o: int, c: int, side: int) -> Tensor:
    """Return the gradient of the kernel, (o, 3, 3, c), given those of U.

    `sums` (pieces, products, c · o and a gap): to be added up.
    """
    of_taps = sums.new_empty(o, 3, 3, c)
    routine = _gradient(o, c, side, len(sums))
    num_pieces = min(o // WIDTH, 4 * torch.get_num_threads())
    routine(num_pieces, sums, of_taps, sums.new_empty(num_pieces, routine.num_scratch))
    return of_taps


@machine_code
def _gradient(o: int, c: int, side: int, num_sums: int) -> Code:
    size = side + 2
    sizes = {"taps": 9 * WIDTH * WIDTH}
    code = Code(num_arguments=3)
    sums, of_taps, scratch = (code.pointer(address, FLOAT) for address in code.arguments)

    def total(x: int, place: Value) -> Value:
        at = [number((piece * size**2 + x) * apart(c * o)) for piece in range(num_sums)]
        found = [code.vector(sums, code.plus(place, start), WIDTH) for start in at]
        return functools.reduce(code.ir.fadd, found)

    with code.every_piece() as piece:
        first, last = code.share(number(o // WIDTH), piece)
        taps = scratch_arrays(code, scratch, piece, sizes)["taps"]
        with (
            code.loop(code.times(first, WIDTH), code.times(last, WIDTH), WIDTH) as out,
            code.loop(number(0), number(c), WIDTH) as at,
        ):
            with code.loop(number(0), number(WIDTH)) as i:  # the outputs of one channel
                place = code.plus(code.times(code.plus(at, i), o), out)
                square = [[total(row * size + column, place) for column in range(size)] for row in range(size)]
                for tap, value in both_ways(square, lambda line: back_to_weights(code, side, line), range(3)):
                    code.store_vector(value, taps, code.times(code.plus(number(tap * WIDTH), i), WIDTH))
            with code.loop(number(0), number(9)) as tap:
                rows = [code.times(code.plus(code.times(tap, WIDTH), number(i)), WIDTH) for i in range(WIDTH)]
                for i, value in enumerate(transposed(code, [code.vector(taps, row, WIDTH) for row in rows])):
                    line = code.plus(code.times(code.plus(out, number(i)), 9), tap)
                    code.store_vector(value, of_taps, code.plus(code.times(line, c), at))
    code.num_scratch = scratch_size(sizes)
    return code
