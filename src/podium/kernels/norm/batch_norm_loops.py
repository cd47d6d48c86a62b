"""The loops of `batch_norm.py` in machine code: per-channel sums, what follows from them, and the values.

Values are rows × c, a row being one position of one sample; c is a multiple of WIDTH. Rows are divided into pieces of
`per_piece`, each of which leaves its own sums in `partial`; a second routine adds them in order, in double precision.
So no bit depends on the number of threads. Each value is read where it lies, `ROWS` rows side by side, whose sums are
formed pairwise before they are added to the others.

Where ReLU follows, it is *found* again in the backward pass what it passed, from x. After a sum, it is *kept*: one bit
for each value, in `mask`, whose integers hold WIDTH of them.
"""

import struct
from collections.abc import Callable
from typing import Literal

from llvmlite import ir

from podium.kernels.jit.llvm import FLOAT, INT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import machine_code
from podium.kernels.jit.vector_ops import constant, whole

#: rows whose sums are formed together
ROWS = 8
#: rows of `factors` of a forward pass, and of those that a backward pass adds
MEAN, INVERSE, SCALE, SHIFT = range(4)
OF_X, REST = range(2)
_DOUBLE = ir.DoubleType()
_DOUBLES = ir.VectorType(_DOUBLE, WIDTH)
_BITS = ir.IntType(WIDTH)
_INTS = ir.VectorType(INT, WIDTH)
#: a place's word in the mask is that many bits to the right
_SHIFT = WIDTH.bit_length() - 1
#: in which way a routine knows where ReLU passed the value
Relu = Literal["none", "found", "kept"]
_Work = Callable[[Value, int], None]


def bits(value: float) -> int:
    """Return a number as a routine takes it: its bits, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _piece_rows(code: Code, piece: Value, rows: Value, per_piece: Value) -> tuple[Value, Value]:
    """Return the first row and the number of rows of a piece."""
    first = code.times(piece, per_piece)
    left = code.ir.sub(rows, first)
    return first, code.least(left, per_piece)


def _at(code: Code, row: Value | int, c: Value, channel: Value) -> Value:
    """Return the place of a value among rows of c."""
    return code.plus(code.times(c, row), channel)


def _every_row(code: Code, first: Value, num: Value, work: _Work) -> None:
    """Write `work(row, number of rows)`, first for ROWS rows at a time, then for single ones."""
    last = code.plus(first, num)
    rest = code.ir.sub(last, code.ir.and_(num, number(ROWS - 1)))
    for start, stop, together in ((first, rest, ROWS), (rest, last, 1)):
        with code.loop(start, stop, together) as row:
            work(row, together)


def _sum(code: Code, vectors: list[Value]) -> Value:
    """Add vectors pairwise."""
    while len(vectors) > 1:
        pairs = [code.ir.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + vectors[2 * len(pairs) :]
    return vectors[0]


def _sum_products(code: Code, left: list[Value], right: list[Value]) -> Value:
    """Add products: every second one to the product before it, then pairwise."""
    sums = [code.ir.fmul(a, b) for a, b in zip(left[::2], right[::2], strict=True)]
    for k, (a, b) in enumerate(zip(left[1::2], right[1::2], strict=True)):
        sums[k] = code.multiply_add(a, b, sums[k])
    return _sum(code, sums)


def _add_to(code: Code, vector: Value, array: Value, at: Value) -> None:
    code.store_vector(code.ir.fadd(code.vector(array, at, WIDTH), vector), array, at)


def _passed(code: Code, relu: Relu, vector: Value, apart: Value, affine: list[Value], mask: Value, at: Value) -> Value:
    """Return those elements of the vector of gradients that ReLU passed, zero in the places of others.

    `apart`: x - mean; `affine`: scale and shift. By operations on integers: of a choice, LLVM makes a load of only the
    elements that are chosen, and what such loads need is not fetched in advance.
    """
    build = code.ir
    if relu == "none":
        return vector
    if relu == "found":  # the sign of -y is set where y is above zero
        y = code.multiply_add(apart, *affine)
        signs = build.bitcast(build.fsub(constant(0.0), y), _INTS)
    else:
        word = build.zext(code.load(mask, build.lshr(at, number(_SHIFT))), INT)
        signs = build.shl(code.spread(word, WIDTH), ir.Constant(_INTS, [31 - lane for lane in range(WIDTH)]))
    every_bit = build.ashr(signs, whole(31))
    return build.bitcast(build.and_(build.bitcast(vector, _INTS), every_bit), vector.type)


# --- forward ----------------------------------------------------------------------------------------------------------


@machine_code
def statistics() -> Code:
    """Write the routine for partial (pieces, 3, c): a value near the mean, the sums of differences from it and of their
    squares. That value is the mean of some rows here and there in the piece: means far from zero cost no precision."""
    code = Code(num_arguments=5)
    rows, c, per_piece, x, partial = code.arguments
    of_x = code.pointer(x, FLOAT)
    with code.every_piece() as piece:
        out = code.pointer(partial, FLOAT, code.times(code.times(piece, 3), c))
        first, num = _piece_rows(code, piece, rows, per_piece)
        few = code.least(num, number(ROWS))
        share = code.ir.fdiv(constant(1.0), code.spread(code.ir.sitofp(few, FLOAT), WIDTH))
        with code.loop(number(0), c, WIDTH) as channel:

            def turn(index: Value, sums: list[Value], channel: Value = channel) -> list[Value]:
                row = code.plus(first, code.ir.sdiv(code.times(index, num), few))
                value = code.vector(of_x, _at(code, row, c, channel), WIDTH)
                return [code.ir.fadd(sums[0], value)]

            near = code.ir.fmul(code.fold(few, [constant(0.0)], turn)[0], share)
            for kind, vector in enumerate((near, constant(0.0), constant(0.0))):
                code.store_vector(vector, out, _at(code, kind, c, channel))

        def work(row: Value, together: int) -> None:
            with code.loop(number(0), c, WIDTH) as channel:
                near = code.vector(out, channel, WIDTH)
                values = [
                    code.vector(of_x, _at(code, code.plus(row, number(k)), c, channel), WIDTH) for k in range(together)
                ]
                apart = [code.ir.fsub(value, near) for value in values]
                _add_to(code, _sum(code, apart), out, _at(code, 1, c, channel))
                _add_to(code, _sum_products(code, apart, apart), out, _at(code, 2, c, channel))

        _every_row(code, first, num, work)
    return code


class _Doubles:
    """Arithmetic with vectors of doubles, and the sums of pieces in order."""

    def __init__(self, code: Code) -> None:
        self._code, self.ir = code, code.ir

    def of(self, array: Value, at: Value) -> Value:
        """Load a vector of floats."""
        return self.ir.fpext(self._code.vector(array, at, WIDTH), _DOUBLES)

    def store(self, vector: Value, array: Value, at: Value) -> None:
        self._code.store_vector(self.ir.fptrunc(vector, ir.VectorType(FLOAT, WIDTH)), array, at)

    def whole(self, value: Value) -> Value:
        """Return a vector of an integer."""
        return self._code.spread(self.ir.sitofp(value, _DOUBLE), WIDTH)

    def passed(self, argument: Value) -> Value:
        """Return a vector of an argument that was given as `bits`."""
        return self._code.spread(self.ir.bitcast(argument, _DOUBLE), WIDTH)

    def constant(self, value: float) -> Value:
        return ir.Constant(_DOUBLES, [value] * WIDTH)

    def root(self, vector: Value) -> Value:
        name = f"llvm.sqrt.v{WIDTH}f64"
        function = self._code.module.globals.get(name)
        if function is None:
            function = ir.Function(self._code.module, ir.FunctionType(_DOUBLES, [_DOUBLES]), name)
        return self.ir.call(function, [vector])

    def sums(self, num: Value, how_many: int, terms: Callable[[Value], list[Value]]) -> list[Value]:
        """Add the terms of all pieces."""
        start = [self.constant(0.0)] * how_many

        def turn(index: Value, sums: list[Value]) -> list[Value]:
            return [self.ir.fadd(total, term) for total, term in zip(sums, terms(index), strict=True)]

        return self._code.fold(num, start, turn)


def _own_channels(code: Code, c: Value, piece: Value) -> tuple[Value, Value]:
    start, stop = code.share(code.ir.sdiv(c, number(WIDTH)), piece)
    return code.times(start, WIDTH), code.times(stop, WIDTH)


@machine_code
def factors() -> Code:
    """Write the routine for factors (4, c) and the running statistics, from `statistics`. A piece is of channels."""
    code = Code(num_arguments=12)
    rows, c, per_piece, num_partial, *addresses, eps, momentum = code.arguments
    partial, weight, bias, mean_so_far, var_so_far, out = (code.pointer(address, FLOAT) for address in addresses)
    wide, build = _Doubles(code), code.ir
    with code.every_piece() as piece, code.loop(*_own_channels(code, c, piece), WIDTH) as channel:

        def read(index: Value) -> tuple[Value, Value, Value, Value]:
            """Return a piece's number of rows, and its three rows of `partial`."""
            num = _piece_rows(code, index, rows, per_piece)[1]
            start = code.times(index, 3)
            found = (wide.of(partial, _at(code, code.plus(start, number(kind)), c, channel)) for kind in range(3))
            near, total, squares = found
            return wide.whole(num), near, total, squares

        def totals(index: Value) -> list[Value]:
            num, near, total, _ = read(index)
            return [build.fadd(build.fmul(num, near), total)]

        count = wide.whole(rows)
        mean = build.fdiv(wide.sums(num_partial, 1, totals)[0], count)

        def squared(index: Value) -> list[Value]:
            """Return the sum of squared differences from the mean: that from `near`, moved."""
            num, near, total, squares = read(index)
            moved = build.fsub(near, mean)
            cross = build.fadd(build.fadd(total, total), build.fmul(num, moved))
            return [build.fadd(squares, build.fmul(moved, cross))]

        spread = wide.sums(num_partial, 1, squared)[0]
        below = build.fcmp_ordered("<", spread, wide.constant(0.0))
        spread = build.select(below, wide.constant(0.0), spread)
        var = build.fdiv(spread, count)
        inverse = build.fdiv(wide.constant(1.0), wide.root(build.fadd(var, wide.passed(eps))))
        scale = build.fmul(wide.of(weight, channel), inverse)
        for row, vector in ((MEAN, mean), (INVERSE, inverse), (SCALE, scale), (SHIFT, wide.of(bias, channel))):
            wide.store(vector, out, _at(code, row, c, channel))
        unbiased = build.fdiv(spread, build.fsub(count, wide.constant(1.0)))
        new = wide.passed(momentum)
        old = build.fsub(wide.constant(1.0), new)
        for newest, so_far in ((mean, mean_so_far), (unbiased, var_so_far)):
            kept = build.fmul(old, wide.of(so_far, channel))
            wide.store(build.fadd(build.fmul(new, newest), kept), so_far, channel)
    return code


@machine_code
def normalised(*, adds: bool, relu: Relu) -> Code:
    """Write the routine for y = (x - mean) · scale + shift, plus `added`, zero where ReLU stops it.

    The last rows come first: they were the last to be read, and some are still in a cache.
    """
    code = Code(num_arguments=8)
    rows, c, per_piece, x, factors, added, y, mask = code.arguments
    of_x, by, more, out = (code.pointer(address, FLOAT) for address in (x, factors, added, y))
    passes = code.pointer(mask, _BITS)
    with code.every_piece() as turn:
        piece = code.ir.sub(code.ir.sub(code.num_pieces, number(1)), turn)

        def work(row: Value, together: int) -> None:
            with code.loop(number(0), c, WIDTH) as channel:
                mean, scale, shift = (
                    code.vector(by, _at(code, kind, c, channel), WIDTH) for kind in (MEAN, SCALE, SHIFT)
                )
                for k in range(together):
                    at = _at(code, code.plus(row, number(k)), c, channel)
                    value = code.multiply_add(code.ir.fsub(code.vector(of_x, at, WIDTH), mean), scale, shift)
                    if adds:
                        value = code.ir.fadd(value, code.vector(more, at, WIDTH))
                    if relu != "none":
                        positive = code.ir.fcmp_unordered(">", value, constant(0.0))  # or not a number: that stays
                        if relu == "kept":
                            code.store(code.ir.bitcast(positive, _BITS), passes, code.ir.lshr(at, number(_SHIFT)))
                        value = code.ir.select(positive, value, constant(0.0))
                    code.store_vector(value, out, at)

        _every_row(code, *_piece_rows(code, piece, rows, per_piece), work)
    return code


# --- backward: g is dy where ReLU passed the value -------------------------------------------------------------------


@machine_code
def gradient_sums(*, relu: Relu) -> Code:
    """Write the routine for partial (pieces, 2, c): Σ g and Σ g (x - mean). The last rows come first."""
    code = Code(num_arguments=8)
    rows, c, per_piece, x, factors, dy, mask, partial = code.arguments
    of_x, by, of_dy = (code.pointer(address, FLOAT) for address in (x, factors, dy))
    passes = code.pointer(mask, _BITS)
    with code.every_piece() as turn:
        piece = code.ir.sub(code.ir.sub(code.num_pieces, number(1)), turn)
        out = code.pointer(partial, FLOAT, code.times(code.times(piece, 2), c))
        with code.loop(number(0), code.times(c, 2), WIDTH) as place:
            code.store_vector(constant(0.0), out, place)

        def work(row: Value, together: int) -> None:
            with code.loop(number(0), c, WIDTH) as channel:
                mean, *affine = (code.vector(by, _at(code, kind, c, channel), WIDTH) for kind in (MEAN, SCALE, SHIFT))
                passed, apart = [], []
                for k in range(together):
                    at = _at(code, code.plus(row, number(k)), c, channel)
                    apart.append(code.ir.fsub(code.vector(of_x, at, WIDTH), mean))
                    vector = code.vector(of_dy, at, WIDTH)
                    passed.append(_passed(code, relu, vector, apart[k], affine, passes, at))
                _add_to(code, _sum(code, passed), out, channel)
                _add_to(code, _sum_products(code, passed, apart), out, _at(code, 1, c, channel))

        _every_row(code, *_piece_rows(code, piece, rows, per_piece), work)
    return code


@machine_code
def gradient_factors() -> Code:
    """Write the routine for the gradients of weight and bias, and for `of_sums` (2, c), which `gradients` needs.

    dx = scale · (g - Σg / N - (x - mean) · inverse² · Σ g (x - mean) / N)
    """
    code = Code(num_arguments=8)
    rows, c, num_partial, *addresses = code.arguments
    partial, factors, of_sums, of_weight, of_bias = (code.pointer(address, FLOAT) for address in addresses)
    wide, build = _Doubles(code), code.ir
    with code.every_piece() as piece, code.loop(*_own_channels(code, c, piece), WIDTH) as channel:

        def read(index: Value) -> list[Value]:
            start = code.times(index, 2)
            return [wide.of(partial, _at(code, code.plus(start, number(kind)), c, channel)) for kind in range(2)]

        total, moment = wide.sums(num_partial, 2, read)
        inverse, scale = (wide.of(factors, _at(code, kind, c, channel)) for kind in (INVERSE, SCALE))
        slope = build.fmul(moment, inverse)
        wide.store(slope, of_weight, channel)
        wide.store(total, of_bias, channel)
        share = build.fneg(build.fdiv(scale, wide.whole(rows)))
        wide.store(build.fmul(build.fmul(slope, inverse), share), of_sums, _at(code, OF_X, c, channel))
        wide.store(build.fmul(total, share), of_sums, _at(code, REST, c, channel))
    return code


@machine_code
def gradients(*, adds: bool, relu: Relu) -> Code:
    """Write the routine for dx = scale · g + of_sums[0] · (x - mean) + of_sums[1]; the gradient of `added` is g."""
    code = Code(num_arguments=10)
    rows, c, per_piece, x, factors, of_sums, dy, mask, dx, of_added = code.arguments
    of_x, by, sums, of_dy, out, more = (
        code.pointer(address, FLOAT) for address in (x, factors, of_sums, dy, dx, of_added)
    )
    passes = code.pointer(mask, _BITS)
    with code.every_piece() as piece:

        def work(row: Value, together: int) -> None:
            with code.loop(number(0), c, WIDTH) as channel:
                mean, *affine = (code.vector(by, _at(code, kind, c, channel), WIDTH) for kind in (MEAN, SCALE, SHIFT))
                of_value, rest = (code.vector(sums, _at(code, kind, c, channel), WIDTH) for kind in (OF_X, REST))
                for k in range(together):
                    at = _at(code, code.plus(row, number(k)), c, channel)
                    apart = code.ir.fsub(code.vector(of_x, at, WIDTH), mean)
                    passed = _passed(code, relu, code.vector(of_dy, at, WIDTH), apart, affine, passes, at)
                    value = code.multiply_add(apart, of_value, rest)
                    code.store_vector(code.multiply_add(passed, affine[0], value), out, at)
                    if adds:
                        code.store_vector(passed, more, at)

        _every_row(code, *_piece_rows(code, piece, rows, per_piece), work)
    return code
