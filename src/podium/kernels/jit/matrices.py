"""Products of large matrices of any strides. Used by `kernels/products.py`.

    target (m, n) = left (m, k) · right (k, n), plus what `start` holds

A piece computes a slab of the target, a block of the inner size after the other. For each it copies its rows of `left`
into tiles (inner, rows) and panels of `right` into (inner, columns), so that a tile's sums stay in registers and all
that they read is in order: tiles come from the second cache, a panel from the first. A value of the target is summed in
the same order however the work is divided, so its bits do not depend on the number of threads.
"""

import functools

import torch
from llvmlite import ir
from torch import Tensor

from podium.kernels.jit.llvm import FLOAT, LONG, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import transposed

#: sums that stay in registers: this many rows by this many vectors; AVX-512 has twice as many registers
ROWS, _VECTORS = (12 if WIDTH == 16 else 6), 2
PANEL = _VECTORS * WIDTH
#: the most of the inner size in a block: a panel of it fits the first cache
_INNER = 256
#: the most rows of a slab: their tiles fit the second cache
_SLAB = 32 * ROWS
#: panels that are copied together
_GROUP = 4
_STEPS = 4
#: the most pieces: so many that those with a slab more than others do not matter
_PIECES_OF_THREAD = 8
#: multiplications from which a thread gets more than one slab, so that none waits long for another
_MANY = 1 << 24


def multiply(left: Tensor, right: Tensor, target: Tensor, start: Tensor | None = None) -> None:
    """Set `target` to left · right, plus `start`: a row, or the target itself.

    Each of the matrices is float32, with elements that are adjacent along one axis; those of target, along rows.
    """
    (m, k), n = left.shape, right.shape[1]
    by_rows, by_inner = left.stride(1) == 1 or k == 1, right.stride(1) == 1 or n == 1
    threads = torch.get_num_threads()
    rows, columns = _slabs(m, n, threads if m * n * k < _MANY or threads == 1 else 2 * threads)
    inner = _rounded(-(-k // -(-k // _INNER)), WIDTH)
    num_units = -(-m // rows) * -(-n // columns)
    num_pieces = min(num_units, _PIECES_OF_THREAD * threads)
    of_tiles = rows * inner + WIDTH
    of_piece = of_tiles + min(_GROUP * PANEL, columns) * inner + ROWS * PANEL
    _product(by_rows, by_inner)(
        num_pieces,
        *(m, k, n, inner, rows, columns),
        *(left, left.stride(0 if by_rows else 1), right, right.stride(0 if by_inner else 1)),
        *(target, target.stride(0)),
        *(0, 0) if start is None else (start, start.stride(0) if start.dim() == 2 else 0),
        *(torch.empty(num_pieces * of_piece), of_piece, of_tiles),
    )


@functools.lru_cache(1 << 12)
def _slabs(m: int, n: int, least: int) -> tuple[int, int]:
    """Return the rows and columns of a slab: at least this many slabs, if there are tiles enough, and the fewest values
    copied."""
    tiles, panels = -(-m // ROWS), -(-n // PANEL)
    best: tuple[int, int, int] | None = None
    for rows in range(-(-tiles * ROWS // _SLAB), tiles + 1):
        columns = min(panels, -(-least // rows))
        copied = rows * n + columns * m
        if best is None or (rows * columns >= least and copied < best[0]) or best[1] * best[2] < least:
            best = copied, rows, columns
        if rows >= least:
            break
    assert best is not None
    return _rounded(-(-m // best[1]), ROWS), _rounded(-(-n // best[2]), PANEL)


def _rounded(value: int, to: int) -> int:
    return -(-value // to) * to


@machine_code
def _product(by_rows: bool, by_inner: bool) -> Code:
    """Write the product; `by_rows`: rows of `left` are in one piece, else columns; `by_inner`: rows of `right` are."""
    code = Code(num_arguments=17)
    m, k, n, inner, rows, columns = code.arguments[:6]
    left, left_stride, right, right_stride = code.arguments[6:10]
    target, target_stride, start, start_stride, scratch, of_piece, of_tiles = code.arguments[10:]
    left, right, target = (code.pointer(address, FLOAT) for address in (left, right, target))
    has_start = code.ir.icmp_signed("!=", start, number(0))
    start = code.pointer(start, FLOAT)
    zeros = ir.GlobalVariable(code.module, ir.ArrayType(FLOAT, PANEL), "zeros")
    zeros.initializer, zeros.global_constant, zeros.linkage = ir.Constant(zeros.value_type, None), True, "internal"
    kernels = [_sums(code, num_rows) for num_rows in range(1, ROWS + 1)]
    row_slabs, column_slabs = _quotient(code, m, rows), _quotient(code, n, columns)
    with (
        code.every_piece() as piece,
        code.loop(*code.share(code.times(row_slabs, column_slabs), piece)) as slab,
    ):
        tiles = code.pointer(scratch, FLOAT, code.times(piece, of_piece))
        panels = code.pointer(tiles, FLOAT, of_tiles)
        aside = code.pointer(tiles, FLOAT, code.ir.sub(of_piece, number(ROWS * PANEL)))
        row = code.times(code.ir.urem(slab, row_slabs), rows)
        column = code.times(code.ir.udiv(slab, row_slabs), columns)
        num_rows = code.least(rows, code.ir.sub(m, row))
        end = code.least(n, code.plus(column, columns))
        num_tiles = _quotient(code, num_rows, number(ROWS))
        with code.loop(number(0), _quotient(code, k, inner)) as block:
            first = code.times(block, inner)
            size = code.least(inner, code.ir.sub(k, first))
            turns = _quotient(code, size, number(_STEPS))
            of_tile, of_panel = code.times(turns, _STEPS * ROWS), code.times(turns, _STEPS * PANEL)
            with code.loop(number(0), num_tiles) as tile:
                at, to = code.plus(row, code.times(tile, ROWS)), code.pointer(tiles, FLOAT, code.times(tile, of_tile))
                _copy(code, left, left_stride, (at, m, ROWS), (first, size), to, turned=by_rows)
            with code.loop(number(0), _quotient(code, code.ir.sub(end, column), number(_GROUP * PANEL))) as group:
                left_edge = code.plus(column, code.times(group, _GROUP * PANEL))
                here = code.least(number(_GROUP * PANEL), code.ir.sub(end, left_edge))
                num_panels = _quotient(code, here, number(PANEL))
                with code.loop(number(0), num_panels) as panel:
                    at = code.plus(left_edge, code.times(panel, PANEL))
                    to = code.pointer(panels, FLOAT, code.times(panel, of_panel))
                    _copy(code, right, right_stride, (at, n, PANEL), (first, size), to, turned=not by_inner)
                with code.loop(number(0), num_panels) as panel, code.loop(number(0), num_tiles) as tile:
                    y, x = code.plus(row, code.times(tile, ROWS)), code.plus(left_edge, code.times(panel, PANEL))
                    num_left = code.least(number(ROWS), code.ir.sub(m, y))
                    place = code.pointer(target, FLOAT, code.plus(code.times(y, target_stride), x))
                    given = code.pointer(start, FLOAT, code.plus(code.times(y, start_stride), x))
                    is_first = code.ir.icmp_signed("==", block, number(0))
                    none = code.ir.and_(is_first, code.ir.not_(has_start))
                    origin = code.ir.select(is_first, given, place)
                    origin_stride = code.ir.select(is_first, start_stride, target_stride)
                    origin = code.ir.select(none, code.pointer(zeros, FLOAT), origin)
                    origin_stride = code.ir.select(none, number(0), origin_stride)
                    factors = code.pointer(tiles, FLOAT, code.times(tile, of_tile))
                    others = code.pointer(panels, FLOAT, code.times(panel, of_panel))
                    width = code.ir.sub(n, x)
                    whole = code.ir.icmp_signed(">=", width, number(PANEL))
                    with code.ir.if_else(whole) as (inside, beyond):
                        with inside:
                            given = (factors, others, place, target_stride, origin, origin_stride, turns)
                            _call(code, kernels, num_left, given)
                        with beyond:  # the last panel sticks out of the target
                            _copy_part(code, num_left, width, origin, origin_stride, aside, number(PANEL))
                            given = (factors, others, aside, number(PANEL), aside, number(PANEL), turns)
                            _call(code, kernels, num_left, given)
                            _copy_part(code, num_left, width, aside, number(PANEL), place, target_stride)
    return code


def _quotient(code: Code, value: Value, by: Value) -> Value:
    """Return the quotient, rounded up."""
    return code.ir.udiv(code.ir.sub(code.plus(value, by), number(1)), by)


def _sums(code: Code, num_rows: int) -> Value:
    """Write the function of one tile: target = start + tile (inner, ROWS)ᵀ · panel (inner, PANEL)."""
    floats = FLOAT.as_pointer()
    with code.function(floats, floats, floats, LONG, floats, LONG, LONG) as function:
        factors, others, target, target_stride, start, start_stride, turns = function.args
        places = [(i, vector * WIDTH) for i in range(num_rows) for vector in range(_VECTORS)]

        def place(i: int, at: int, stride: Value) -> Value:
            return code.plus(code.times(stride, i), number(at))

        def several(turn: Value, sums: list[Value]) -> list[Value]:
            for step in range(_STEPS):
                line = code.plus(code.times(turn, _STEPS), number(step))
                row = [
                    code.vector(others, code.plus(code.times(line, PANEL), number(vector * WIDTH)), WIDTH)
                    for vector in range(_VECTORS)
                ]
                found = []
                for i in range(num_rows):
                    factor = code.load(factors, code.plus(code.times(line, ROWS), number(i)))
                    factor = code.spread(factor, WIDTH)
                    found += [
                        code.multiply_add(factor, other, sums[i * _VECTORS + vector])
                        for vector, other in enumerate(row)
                    ]
                sums = found
            return sums

        given = [code.vector(start, place(i, at, start_stride), WIDTH) for i, at in places]
        for (i, at), total in zip(places, code.fold(turns, given, several), strict=True):
            code.store_vector(total, target, place(i, at, target_stride))
    return function


def _call(code: Code, kernels: list[Value], num_rows: Value, arguments: tuple[Value, ...]) -> None:
    """Call the function for this many rows."""
    after = code.ir.append_basic_block()
    blocks = [code.ir.append_basic_block() for _ in kernels]
    switch = code.ir.switch(num_rows, blocks[-1])
    for rows, (block, kernel) in enumerate(zip(blocks, kernels, strict=True), start=1):
        if rows < len(kernels):
            switch.add_case(number(rows), block)
        code.ir.position_at_end(block)
        code.ir.call(kernel, arguments)
        code.ir.branch(after)
    code.ir.position_at_end(after)


def _copy(
    code: Code,
    source: Value,
    stride: Value,
    lines: tuple[Value, Value, int],
    inner: tuple[Value, Value],
    to: Value,
    *,
    turned: bool,
) -> None:
    """Copy the lines from the first of `lines` on (up to the third of them, below the second) as (inner, lines).

    `turned`: each line is in one piece, and neighbours are `stride` apart; else the lines' values for one place of the
    inner size are in one piece. Values for lines beyond the last are any; the inner size is filled up with zeros.
    """
    (first, end, width), (start, size) = lines, inner
    last = code.ir.sub(end, number(1))

    def line(i: int) -> Value:
        return code.least(code.plus(first, number(i)), last)

    def one(at: Value, i: int, value: Value) -> None:
        code.store(value, to, code.plus(code.times(at, width), number(i)))

    def single(at: Value) -> None:
        place = code.plus(start, at)
        for i in range(width):
            where = (line(i), place) if turned else (place, line(i))
            one(at, i, code.load(source, code.plus(code.times(where[0], stride), where[1])))

    if turned:
        whole = code.ir.and_(size, number(-WIDTH))
        with code.loop(number(0), whole, WIDTH) as at:
            for part in range(0, width, WIDTH):
                used = min(WIDTH, width - part)
                found = [
                    code.vector(source, code.plus(code.times(line(part + i), stride), code.plus(start, at)), WIDTH)
                    for i in range(used)
                ]
                found += [code.spread(FLOAT(0.0), WIDTH)] * (WIDTH - used)
                # In order: where a tile is narrower than a vector, the next one writes over what is too much.
                for i, vector in enumerate(transposed(code, found)):
                    code.store_vector(vector, to, code.plus(code.times(code.plus(at, number(i)), width), number(part)))
        with code.loop(whole, size) as at:
            single(at)
    else:
        reach = code.plus(first, number(_rounded(width, WIDTH)))
        with code.ir.if_else(code.ir.icmp_signed("<=", reach, end)) as (inside, beyond):
            with inside, code.loop(number(0), size) as at:
                place = code.plus(code.times(code.plus(start, at), stride), first)
                for part in range(0, width, WIDTH):
                    vector = code.vector(source, code.plus(place, number(part)), WIDTH)
                    code.store_vector(vector, to, code.plus(code.times(at, width), number(part)))
            with beyond, code.loop(number(0), size) as at:
                single(at)
    with code.loop(size, code.times(_quotient(code, size, number(_STEPS)), _STEPS)) as at:
        for i in range(width):
            one(at, i, FLOAT(0.0))


def _copy_part(
    code: Code, rows: Value, columns: Value, source: Value, stride: Value, to: Value, to_stride: Value
) -> None:
    with code.loop(number(0), rows) as y, code.loop(number(0), columns) as x:
        value = code.load(source, code.plus(code.times(y, stride), x))
        code.store(value, to, code.plus(code.times(y, to_stride), x))
