"""Gradients of a first convolution under a max-pool: few taps, and no image gradient needed. Called by `conv_pool.py`.

`conv_pool_loops.py` makes lists of what the pool selected, which costs more than all products if an output has a dozen
taps. Here nothing is left out: for every position of a window, a vector of channels takes the gradient of those that
chose it and zeros for the others. The additions that count are the same in the same order, so the bits are those of
`conv_pool_loops.py` (mnist's first layer, micro-batch 8, one AVX2 core: 0.07 ms instead of 0.22).

    image (n, h, w, c), pooled (n, q, o), all contiguous; q counts windows row by row; a strip is a vector of channels
"""

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.conv.conv_pool_loops import NONE, Geometry, image_starts
from podium.kernels.jit.llvm import BYTE, FLOAT, INT, LONG, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

#: sums of a strip held in registers at a time, besides the gradients of the positions and the factors
_MOST_SUMS = 9
#: products per window and channel, zeros included, that cost less than an entry in a list
_MOST_PRODUCTS = 64


def fits(geometry: Geometry) -> bool:
    return geometry.num_taps * geometry.window_area <= _MOST_PRODUCTS and geometry.num_out >= WIDTH


def gradients(geometry: Geometry, image: Tensor, chosen: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of taps (o, a, b, c) and bias, given that of `pooled`."""
    routine, starts = _routine(geometry), image_starts(geometry)
    num_pieces, num_weights = torch.get_num_threads(), geometry.num_out * geometry.num_taps
    sums = torch.empty(num_pieces, num_weights + geometry.num_out)  # of the taps, followed by those of the bias
    routine(num_pieces, len(image), image, chosen, grad, starts, sums, torch.empty(num_pieces * routine.num_scratch))
    total = sums[0] if num_pieces == 1 else sums.sum(0)
    shape = (geometry.num_out, *geometry.kernel, geometry.image[2])
    return total[:num_weights].view(shape), total[num_weights:]


@machine_code
def _routine(geometry: Geometry) -> Code:
    """Write the routine; its scratch memory is floats for the sums of a piece."""
    _, width, depth = geometry.image
    num_out, num_taps, area, num_windows = (
        geometry.num_out, geometry.num_taps, geometry.window_area, geometry.num_windows
    )  # fmt: skip
    inputs = [i * width * depth + at for i in range(geometry.kernel[0]) for at in range(geometry.kernel[1] * depth)]
    num_groups = -(-num_taps // _MOST_SUMS)
    groups = [range(g * num_taps // num_groups, (g + 1) * num_taps // num_groups) for g in range(num_groups)]
    num_strips = -(-num_out // WIDTH)
    per_strip = (num_taps + 1) * WIDTH  # the last ones belong to the bias
    num_scratch = num_strips * per_strip + 16  # no two threads write to the same cache line

    code = Code(num_arguments=7)
    num_samples, image, chosen, grad, starts, sums, scratch = code.arguments
    starts_of = code.pointer(starts, INT)
    with code.every_piece() as piece:
        found = code.pointer(scratch, FLOAT, code.times(piece, num_scratch))
        with code.loop(number(0), number(num_strips * per_strip), WIDTH) as at:
            code.store_vector(_spread(0.0), found, at)
        with (
            code.loop(*code.share(num_samples, piece)) as sample,
            code.loop(number(0), number(num_strips)) as strip,
        ):
            image_of = code.pointer(image, FLOAT, code.times(sample, geometry.num_inputs))
            line = code.plus(code.times(sample, num_windows * num_out), _first_channel(code, strip, num_out))
            strip_of = code.pointer(found, FLOAT, code.times(strip, per_strip))
            for group in groups:
                last = group.stop == num_taps

                def turn(q: Value, totals: list[Value], group: range = group, line: Value = line) -> list[Value]:
                    at = code.plus(line, code.times(q, num_out))
                    g, which = _gradient(code, grad, chosen, at)
                    bias = (
                        [code.ir.fadd(totals[-1], _where(code, "!=", which, NONE, g))]
                        if len(totals) > len(group)
                        else []
                    )
                    totals = totals[: len(group)]
                    for r in range(area):
                        passed = _where(code, "==", which, r, g)
                        start = code.load(starts_of, code.plus(code.times(q, area), number(r)))
                        start = code.ir.zext(start, LONG)
                        values = (code.load(image_of, code.plus(start, number(inputs[tap]))) for tap in group)
                        totals = [
                            code.multiply_add(code.spread(value, WIDTH), passed, total)
                            for value, total in zip(values, totals, strict=True)
                        ]
                    return totals + bias

                begin = [_spread(0.0)] * len(group)
                if last:
                    begin.append(code.vector(strip_of, number(num_taps * WIDTH), WIDTH))
                totals = code.fold(number(num_windows), begin, turn)
                for tap, total in zip(group, totals, strict=False):
                    place = number(tap * WIDTH)
                    code.store_vector(code.ir.fadd(code.vector(strip_of, place, WIDTH), total), strip_of, place)
                if last:
                    code.store_vector(totals[-1], strip_of, number(num_taps * WIDTH))
        sums_of = code.pointer(sums, FLOAT, code.times(piece, num_out * (num_taps + 1)))
        with code.loop(number(0), number(num_strips)) as strip, code.loop(number(0), number(WIDTH)) as lane:
            channel = code.plus(_first_channel(code, strip, num_out), lane)
            lane_of = code.pointer(found, FLOAT, code.plus(code.times(strip, per_strip), lane))
            for tap in range(num_taps):
                value = code.load(lane_of, number(tap * WIDTH))
                code.store(value, sums_of, code.plus(code.times(channel, num_taps), number(tap)))
            code.store(
                code.load(lane_of, number(num_taps * WIDTH)), sums_of, code.plus(number(num_out * num_taps), channel)
            )
    code.num_scratch = num_scratch
    return code


def _first_channel(code: Code, strip: Value, num_out: int) -> Value:
    """Return a strip's first channel.

    The last strip ends with the last channel, so it may overlap the one before, with the same sums.
    """
    start, latest = code.times(strip, WIDTH), number(num_out - WIDTH)
    return code.ir.select(code.ir.icmp_signed("<", start, latest), start, latest)


def _gradient(code: Code, grad: Value, chosen: Value, at: Value) -> tuple[Value, Value]:
    """Return, for a strip of a window, the gradients and the position that each channel chose."""
    place = code.ir.bitcast(code.pointer(chosen, BYTE, at), ir.VectorType(BYTE, WIDTH).as_pointer())
    which = code.ir.zext(code.ir.load(place, align=1), ir.VectorType(INT, WIDTH))
    return code.vector(code.pointer(grad, FLOAT), at, WIDTH), which


def _where(code: Code, relation: str, which: Value, position: int, g: Value) -> Value:
    """Return g where the relation holds and zero elsewhere."""
    wanted = ir.Constant(which.type, [position] * WIDTH)
    return code.ir.select(code.ir.icmp_unsigned(relation, which, wanted), g, _spread(0.0))


def _spread(value: float) -> Value:
    return ir.Constant(ir.VectorType(FLOAT, WIDTH), [value] * WIDTH)
