"""Max-pool after a convolution, forward and backward. Called by `conv_pool.py`.

The pool passes the gradient on to one position of each window, so with windows of 2 × 2 three quarters of the values
that reach the convolution are zeros, which a library multiplies nonetheless. Here they are skipped:

    for every sample:
        for every window q and channel o with a gradient g ≠ 0, chosen position r:
            to o's list:  (g, where the chosen position's inputs begin)
            to r's list:  (g, where the taps of o begin)
            image gradient at the inputs of (q, r)  += Σ g · taps  over r's list
        weight gradient of o  += Σ g · inputs  over o's list

Sums over a list are kept in vector registers. The samples are divided into as many pieces as there are threads, and
every piece has a weight gradient of its own, so the number of threads is part of the numerics, as with torch's
operators.

    image (n, h, w, c), taps (o, a, b, c), pooled (n, q, o), all contiguous; q counts windows row by row
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.jit.llvm import BYTE, FLOAT, INT, LONG, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code

_MOST_SUMS = 12  # vectors summed at a time; the 16 registers also hold the inputs
NONE = 255  # instead of a chosen position: no gradient passes, since ReLU zeroed the value


@dataclass(frozen=True, eq=False)
class Geometry:
    """Sizes of one block: a convolution of stride 1 without padding, and windows side by side. See `geometry_of`."""

    image: tuple[int, int, int]  # h, w, c
    kernel: tuple[int, int]
    num_out: int
    window: tuple[int, int]
    relu: bool

    @cached_property
    def conv(self) -> tuple[int, int]:
        return self.image[0] - self.kernel[0] + 1, self.image[1] - self.kernel[1] + 1

    @cached_property
    def num_conv(self) -> int:
        """Return the number of values that the convolution makes of one sample."""
        return self.conv[0] * self.conv[1] * self.num_out

    @cached_property
    def pooled(self) -> tuple[int, int]:
        return self.conv[0] // self.window[0], self.conv[1] // self.window[1]

    @cached_property
    def num_windows(self) -> int:
        return self.pooled[0] * self.pooled[1]

    @cached_property
    def window_area(self) -> int:
        return self.window[0] * self.window[1]

    @cached_property
    def num_inputs(self) -> int:
        return self.image[0] * self.image[1] * self.image[2]

    @cached_property
    def small(self) -> bool:
        """Return whether a library's convolution has so few products per value that memory limits it."""
        return self.num_taps <= 40 and self.num_taps * self.window_area <= 512

    @cached_property
    def num_taps(self) -> int:
        """Return the number of taps of one output channel."""
        return self.kernel[0] * self.kernel[1] * self.image[2]


@functools.cache
def geometry_of(
    image: tuple[int, int, int], kernel: tuple[int, int], num_out: int, window: tuple[int, int], relu: bool
) -> Geometry:
    """Return the one object for these sizes, under which its routines are cached."""
    return Geometry(image, kernel, num_out, window, relu)


def pool(geometry: Geometry, conv: Tensor, pooled: Tensor, chosen: Tensor) -> None:
    """Pool `conv` (n, rows, columns, o) into `pooled`, after ReLU if there is one, and `chosen`, bytes for `gradients`.

    `conv` may lack rows and columns that no window covers.
    """
    _, num_rows, num_columns, _ = conv.shape
    routine, starts = _pool(geometry, num_rows, num_columns), window_starts(geometry, num_columns, geometry.num_out)
    routine(torch.get_num_threads(), len(conv), conv, pooled, chosen, starts)


def convolve_and_pool(
    geometry: Geometry, image: Tensor, taps: Tensor, bias: Tensor | None, pooled: Tensor, chosen: Tensor
) -> None:
    """Do the same from the image, without storing the convolution's output; for blocks that are `small`."""
    routine, starts = _convolve_and_pool(geometry), image_starts(geometry)
    bias = taps.new_zeros(geometry.num_out) if bias is None else bias
    num_pieces = torch.get_num_threads()
    by_tap = torch.empty(num_pieces, taps.numel())
    routine(num_pieces, len(image), image, taps, bias, pooled, chosen, starts, by_tap)


def gradients(
    geometry: Geometry, image: Tensor, taps: Tensor, chosen: Tensor, grad: Tensor, wants_image: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of image, taps and bias, given that of `pooled`."""
    routine, starts = _gradients(geometry, wants_image), image_starts(geometry)
    num_pieces, num_weights = torch.get_num_threads(), taps.numel()
    sums = taps.new_zeros(num_pieces, num_weights + geometry.num_out)  # of the taps, followed by those of the bias
    of_image = torch.zeros_like(image) if wants_image else None
    scratch = torch.empty(num_pieces * routine.num_scratch, dtype=torch.int32)
    there = 0 if of_image is None else of_image
    routine(num_pieces, len(image), image, taps, chosen, grad, starts, sums, there, scratch)
    total = sums[0] if num_pieces == 1 else sums.sum(0)
    return of_image, total[:num_weights].view(taps.shape), total[num_weights:]


def image_starts(geometry: Geometry) -> Tensor:
    """Return `window_starts` in the image itself."""
    _, width, depth = geometry.image
    return window_starts(geometry, width, depth)


@functools.cache
def window_starts(geometry: Geometry, width: int, depth: int) -> Tensor:
    """Return, as int32 (q, r), where position r of window q begins in an image of this width and depth."""
    (num_rows, num_columns), (high, wide) = geometry.pooled, geometry.window
    rows = torch.arange(num_rows)[:, None] * high + torch.arange(high)  # (rows of windows, high)
    columns = torch.arange(num_columns)[:, None] * wide + torch.arange(wide)
    starts = (rows[:, None, :, None] * width + columns[None, :, None, :]) * depth
    return starts.reshape(geometry.num_windows, geometry.window_area).to(torch.int32)


@machine_code
def _pool(geometry: Geometry, num_rows: int, num_columns: int) -> Code:
    code = Code(num_arguments=5)
    num_samples, conv, pooled, chosen, starts = code.arguments

    def values(_: Value, sample: Value, places: list[Value], o: Value, sizes: list[int]) -> Iterator[list[Value]]:
        conv_of = code.pointer(conv, FLOAT, code.times(sample, num_rows * num_columns * geometry.num_out))
        for place in places:
            yield [
                code.vector(conv_of, code.plus(code.plus(place, o), number(at)), size) for at, size in _placed(sizes)
            ]

    _every_window(code, geometry, num_samples, starts, pooled, chosen, values)
    return code


@machine_code
def _convolve_and_pool(geometry: Geometry) -> Code:
    _, width, depth = geometry.image
    num_taps, num_out = geometry.num_taps, geometry.num_out
    code = Code(num_arguments=8)
    num_samples, image, taps, bias, pooled, chosen, starts, by_tap = code.arguments
    taps_of, bias_of = code.pointer(taps, FLOAT), code.pointer(bias, FLOAT)
    inputs = [i * width * depth + at for i in range(geometry.kernel[0]) for at in range(geometry.kernel[1] * depth)]

    def begin(piece: Value) -> Value:
        """Transpose the taps (o, tap) to (tap, o), for each piece."""
        by_tap_of = code.pointer(by_tap, FLOAT, code.times(piece, num_taps * num_out))
        with code.loop(number(0), number(num_out)) as o, code.loop(number(0), number(num_taps)) as tap:
            value = code.load(taps_of, code.plus(code.times(o, num_taps), tap))
            code.store(value, by_tap_of, code.plus(code.times(tap, num_out), o))
        return by_tap_of

    def values(
        by_tap_of: Value, sample: Value, places: list[Value], o: Value, sizes: list[int]
    ) -> Iterator[list[Value]]:
        image_of = code.pointer(image, FLOAT, code.times(sample, geometry.num_inputs))
        # Two positions at a time: enough sums under way to keep the processor busy, and they share the taps.
        for pair in (places[at : at + 2] for at in range(0, len(places), 2)):
            first = [code.vector(bias_of, code.plus(o, number(at)), size) for at, size in _placed(sizes)]
            sums = [first] * len(pair)
            for tap, at in enumerate(inputs):
                row = code.plus(o, number(tap * num_out))
                weights = [code.vector(by_tap_of, code.plus(row, number(at)), size) for at, size in _placed(sizes)]
                found = [code.load(image_of, code.plus(place, number(at))) for place in pair]
                sums = [
                    [code.multiply_add(code.spread(x, t.type.count), t, v) for t, v in zip(weights, of, strict=True)]
                    for x, of in zip(found, sums, strict=True)
                ]
            yield from sums

    _every_window(code, geometry, num_samples, starts, pooled, chosen, values, begin)
    return code


def _every_window(
    code: Code,
    geometry: Geometry,
    num_samples: Value,
    starts: Value,
    pooled: Value,
    chosen: Value,
    values: Callable[[Value, Value, list[Value], Value, list[int]], Iterator[list[Value]]],
    begin: Callable[[Value], Value] = lambda piece: piece,
) -> None:
    """Write the whole routine.

    `values(begun, sample, places, o, sizes)` yields, for every position of a window, the values of the channels from o
    on, as vectors of these sizes; `begun` is what `begin` returned for the piece.
    """
    num_out, num_together = geometry.num_out, 4 * WIDTH
    whole = num_out - num_out % num_together
    rest = [min(WIDTH, num_out - at) for at in range(whole, num_out, WIDTH)]
    starts_of = code.pointer(starts, INT)
    with code.every_piece() as piece:
        begun = begin(piece)
        with (
            code.loop(*code.share(num_samples, piece)) as sample,
            code.loop(number(0), number(geometry.num_windows)) as q,
        ):
            at = code.times(code.plus(code.times(sample, geometry.num_windows), q), num_out)
            pooled_of, chosen_of = code.pointer(pooled, FLOAT, at), code.pointer(chosen, BYTE, at)
            first = code.times(q, geometry.window_area)
            places = [
                code.ir.zext(code.load(starts_of, code.plus(first, number(r))), LONG)
                for r in range(geometry.window_area)
            ]
            with code.loop(number(0), number(whole), num_together) as o:
                _choose(code, geometry, values(begun, sample, places, o, [WIDTH] * 4), o, pooled_of, chosen_of)
            if rest:
                _choose(
                    code,
                    geometry,
                    values(begun, sample, places, number(whole), rest),
                    number(whole),
                    pooled_of,
                    chosen_of,
                )


def _choose(
    code: Code, geometry: Geometry, values: Iterator[list[Value]], o: Value, pooled: Value, chosen: Value
) -> None:
    """Choose the first of a window's largest values, or the last that is not a number, as torch's own pool does."""
    build = code.ir
    best = next(values)
    sizes = [vector.type.count for vector in best]

    def bytes_of(value: int, size: int) -> Value:
        return ir.Constant(ir.VectorType(BYTE, size), [value] * size)

    which = [bytes_of(0, size) for size in sizes]
    for r, candidates in enumerate(values, start=1):
        for k, value in enumerate(candidates):
            better = build.or_(build.fcmp_ordered(">", value, best[k]), build.fcmp_unordered("uno", value, value))
            best[k] = build.select(better, value, best[k])
            which[k] = build.select(better, bytes_of(r, sizes[k]), which[k])
    for k, (at, size) in enumerate(_placed(sizes)):
        if geometry.relu:
            zero = ir.Constant(best[k].type, [0.0] * size)
            dead = build.fcmp_ordered("<=", best[k], zero)
            best[k] = build.select(dead, zero, best[k])
            which[k] = build.select(dead, bytes_of(NONE, size), which[k])
        place = code.plus(o, number(at))
        code.store_vector(best[k], pooled, place)
        build.store(which[k], build.bitcast(build.gep(chosen, [place]), which[k].type.as_pointer()), align=1)


def _placed(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of consecutive vectors."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)


@machine_code
def _gradients(geometry: Geometry, wants_image: bool) -> Code:
    """Write the routine; its scratch memory is 32-bit numbers for the lists of a piece."""
    num_out, area, num_windows = geometry.num_out, geometry.window_area, geometry.num_windows
    num_lines = num_out * num_windows
    sizes = {"g of o": num_lines, "inputs of o": num_lines, "length of o": num_out}
    sizes |= {"g of r": area * num_out, "taps of r": area * num_out, "length of r": area}
    sizes |= {"apart": 16}  # so that no two threads write to the same cache line
    num_scratch = sum(sizes.values())

    code = Code(num_arguments=9)
    build = code.ir
    num_samples, image, taps, chosen, grad, starts, sums, of_image, scratch = code.arguments
    taps_of, starts_of = code.pointer(taps, FLOAT), code.pointer(starts, INT)
    zero = ir.Constant(INT, 0)
    with code.every_piece() as piece:
        of_taps = code.pointer(sums, FLOAT, code.times(piece, num_out * (geometry.num_taps + 1)))
        of_bias = code.pointer(of_taps, FLOAT, number(num_out * geometry.num_taps))
        lists, at = {}, 0
        for name, size in sizes.items():
            start = code.plus(code.times(piece, num_scratch), number(at))
            lists[name] = code.pointer(scratch, FLOAT if name.startswith("g") else INT, start)
            at += size
        with code.loop(*code.share(num_samples, piece)) as sample:
            image_of = code.pointer(image, FLOAT, code.times(sample, geometry.num_inputs))
            of_image_of = code.pointer(of_image, FLOAT, code.times(sample, geometry.num_inputs))
            with code.loop(number(0), number(num_out)) as o:
                code.store(zero, lists["length of o"], o)
            with code.loop(number(0), number(num_windows)) as q:
                first = code.times(q, area)
                if wants_image:
                    with code.loop(number(0), number(area)) as r:
                        code.store(zero, lists["length of r"], r)
                with code.loop(number(0), number(num_out)) as o:
                    line = code.plus(code.times(code.plus(code.times(sample, num_windows), q), num_out), o)
                    which = code.load(code.pointer(chosen, BYTE), line)
                    passes = build.icmp_unsigned("!=", which, ir.Constant(BYTE, NONE))
                    # An entry beyond the list's length is overwritten by the next one: no branch depends on data.
                    which = build.select(passes, build.zext(which, LONG), number(0))
                    g = code.load(code.pointer(grad, FLOAT), line)
                    onto_bias = build.select(passes, g, ir.Constant(FLOAT, 0.0))
                    code.store(build.fadd(code.load(of_bias, o), onto_bias), of_bias, o)
                    inputs = code.load(starts_of, code.plus(first, which))
                    _append(code, lists, "o", o, num_windows, passes, g, "inputs", inputs)
                    if wants_image:
                        where = build.trunc(code.times(o, geometry.num_taps), INT)
                        _append(code, lists, "r", which, num_out, passes, g, "taps", where)
                if wants_image:
                    with code.loop(number(0), number(area)) as r:
                        inputs = build.zext(code.load(starts_of, code.plus(first, r)), LONG)
                        lines = _lines(code, lists, "r", r, num_out, "taps")
                        for group in _groups(geometry):
                            _add_sums(code, of_image_of, inputs, taps_of, lines, group)
            with code.loop(number(0), number(num_out)) as o:
                lines = _lines(code, lists, "o", o, num_windows, "inputs")
                for group in _groups(geometry):
                    of_o = code.times(o, geometry.num_taps)
                    _add_sums(code, of_taps, of_o, image_of, lines, [(tap, x, k) for x, tap, k in group])
    code.num_scratch = num_scratch
    return code


def _append(
    code: Code, lists: dict[str, Value], kind: str, key: Value, room: int, passes: Value, g: Value, of: str, at: Value
) -> None:
    """Append the line (g, at) to the list of `key`, which has `room`; it is kept only if it passes."""
    length = code.load(lists[f"length of {kind}"], key)
    line = code.plus(code.times(key, room), code.ir.zext(length, LONG))
    code.store(g, lists[f"g of {kind}"], line)
    code.store(at, lists[f"{of} of {kind}"], line)
    code.store(code.ir.add(length, code.ir.zext(passes, INT)), lists[f"length of {kind}"], key)


def _lines(
    code: Code, lists: dict[str, Value], kind: str, key: Value, room: int, of: str
) -> tuple[Value, Value, Value]:
    """Return the lines in the list of `key`: how many, their g, their places."""
    start = [code.times(key, room)]
    length = code.ir.zext(code.load(lists[f"length of {kind}"], key), LONG)
    return length, code.ir.gep(lists[f"g of {kind}"], start), code.ir.gep(lists[f"{of} of {kind}"], start)


def _add_sums(
    code: Code,
    target: Value,
    target_at: Value,
    source: Value,
    lines: tuple[Value, Value, Value],
    vectors: list[tuple[int, int, int]],
) -> None:
    """Add to target[target_at + i …] the sum of g · source[at + j …] over the lines, for the vectors (i, j, size)."""
    num, all_g, all_at = lines

    def turn(line: Value, sums: list[Value]) -> list[Value]:
        g = code.load(all_g, line)
        at = code.ir.zext(code.load(all_at, line), LONG)
        factors = {size: code.spread(g, size) for size in {size for *_, size in vectors}}
        return [
            code.multiply_add(code.vector(source, code.plus(at, number(j)), size), factors[size], total)
            for (_, j, size), total in zip(vectors, sums, strict=True)
        ]

    sums = code.fold(num, [ir.Constant(ir.VectorType(FLOAT, size), [0.0] * size) for *_, size in vectors], turn)
    for (i, _, size), total in zip(vectors, sums, strict=True):
        place = code.plus(target_at, number(i))
        code.store_vector(code.ir.fadd(code.vector(target, place, size), total), target, place)


def _groups(geometry: Geometry) -> list[list[tuple[int, int, int]]]:
    """Return the taps of an output channel as vectors (place among the inputs, place among the taps, size).

    They come in groups that fit the registers. A row of the kernel is contiguous in the image too.
    """
    _, width, depth = geometry.image
    row = geometry.kernel[1] * depth
    vectors = [
        (i * width * depth + at, i * row + at, min(WIDTH, row - at))
        for i in range(geometry.kernel[0])
        for at in range(0, row, WIDTH)
    ]
    num_groups = -(-len(vectors) // _MOST_SUMS)
    size = -(-len(vectors) // num_groups)
    return [vectors[start : start + size] for start in range(0, len(vectors), size)]
