"""Self-attention as one operator, forward and backward, with dropout and masks. Applied to models by
`kernels/install.py`.

torch's fused attention has no dropout on a CPU: with dropout, scores, weights, masks and random numbers each go through
memory several times. Here a block of queries keeps its scores in a core's cache, and causal attention does not compute
what comes after a query. Nothing of size S × S is kept for the backward pass, which computes the weights again.

    s = scale · q kᵀ     p = softmax(s)     w = p · kept / (1 - dropout)     o = w v
    dv = wᵀ do           dw = do vᵀ         ds = p (dw · kept / (1 - dropout) - Σ do o)
    dq = scale · ds k    dk = scale · dsᵀ q

Every head of every sample is processed by one thread, so the number of threads changes no bit.

    qkv (B, S, 3, H, D), output (B, S, H, D), contiguous; r queries of a block, t keys they may attend to
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor, nn

from podium.kernels.eligibility import leave_to_torch
from podium.kernels.jit.llvm import BYTE, FLOAT, INT, WIDTH, Code, Value, number
from podium.kernels.jit.routine import Routine, machine_code
from podium.kernels.jit.vector_ops import (
    PANEL,
    across,
    constant,
    copy,
    draw_seed,
    exponential,
    kept,
    larger,
    line_key,
    multiply,
    scratch_arrays,
    scratch_size,
    threshold,
    transpose,
)
from podium.layers.transformer import SelfAttention

_MOST_QUERIES = 32
#: heads of other sizes and longer rows are left to torch
_MOST_HEAD, _MOST_LENGTH = 256, 4096
#: fewer are not worth the call
LEAST_SCORES = 1 << 17
#: far below every score, but finite: a row that may attend to nothing becomes zeros
_LOWEST = -3e38


@dataclass(frozen=True)
class Geometry:
    """Sizes of one attention: S, H, D, which keys may be attended to, and the share of weights dropped."""

    length: int
    heads: int
    head: int
    causal: bool
    masked: bool
    dropout: float

    @property
    def hidden(self) -> int:
        return self.heads * self.head

    @property
    def queries(self) -> int:
        """Return the number of queries of a block."""
        return _MOST_QUERIES if self.length % _MOST_QUERIES == 0 else PANEL

    @property
    def stride(self) -> int:
        """Return the stride of rows as long as the sequence: a power of two would map all to the same cache set."""
        return self.length + PANEL

    @property
    def scale(self) -> float:
        return float(self.head**-0.5)


def fits(shape: Sequence[int], heads: int, mask: Tensor | None) -> bool:
    """Return whether `Attention` can take x (B, S, hidden), in single precision on a CPU, and a mask for all heads."""
    if len(shape) != 3:
        return False
    num_rows, length, head = shape[0], shape[1], shape[2] // heads
    if head % WIDTH or head > _MOST_HEAD or length % PANEL or length > _MOST_LENGTH:
        return False
    if num_rows * heads * length * length < LEAST_SCORES:
        return False
    if mask is None:
        return True
    return mask.dtype == torch.bool and mask.shape in ((num_rows, 1, length, length), (1, 1, length, length))


class Attention(torch.autograd.Function):
    """Attention from qkv (B, S, 3 · hidden) to (B, S, hidden). `mask`, as `fits` requires: true where allowed."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, heads: int, causal: bool, dropout: float) -> Tensor:
        qkv = qkv.contiguous()
        num_rows, length, width = qkv.shape
        geometry = Geometry(length, heads, width // 3 // heads, causal, mask is not None, dropout)
        if mask is not None:
            mask = mask.expand(num_rows, -1, -1, -1).contiguous()
        seed = draw_seed() if dropout else 0
        output = qkv.new_empty(num_rows, length, geometry.hidden)
        statistics = qkv.new_empty(num_rows, heads, length, 2)
        _run(_forward(geometry), num_rows * heads, qkv, 0 if mask is None else mask, seed, output, statistics)
        ctx.save_for_backward(qkv, mask, output, statistics)
        ctx.geometry, ctx.seed = geometry, seed
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, mask, output, statistics = ctx.saved_tensors
        of_qkv = torch.empty_like(qkv)
        arrays = (qkv, 0 if mask is None else mask, ctx.seed, output, statistics, grad.contiguous(), of_qkv)
        _run(_backward(ctx.geometry), statistics.shape[0] * statistics.shape[1], *arrays)
        return of_qkv, None, None, None, None


def _run(routine: Routine, num_items: int, *arguments: int | Tensor) -> None:
    num_pieces = min(num_items, 4 * torch.get_num_threads())
    routine(num_pieces, num_items, torch.empty(num_pieces, routine.num_scratch), *arguments)


@dataclass
class _Item:
    """One head of one sample, as a routine sees it."""

    number: Value
    #: where its first query, key and value are, and its first output
    query: Value
    key: Value
    value: Value
    output: Value
    #: two numbers for every query
    statistics: Value
    mask: Value
    seed: Value


def _item(
    code: Code, geometry: Geometry, at: Value, qkv: Value, mask: Value, seed: Value, output: Value, statistics: Value
) -> _Item:
    length, hidden = geometry.length, geometry.hidden
    sample, head = code.ir.udiv(at, number(geometry.heads)), code.ir.urem(at, number(geometry.heads))
    within = code.times(head, geometry.head)
    first = code.plus(code.times(sample, length * 3 * hidden), within)
    query, key, value = (code.pointer(qkv, FLOAT, code.plus(first, number(part * hidden))) for part in range(3))
    return _Item(
        at,
        query,
        key,
        value,
        code.pointer(output, FLOAT, code.plus(code.times(sample, length * hidden), within)),
        code.pointer(statistics, FLOAT, code.times(at, length * 2)),
        code.pointer(mask, BYTE, code.times(sample, length * length)),
        seed,
    )


@machine_code
def _forward(geometry: Geometry) -> Code:
    length, head, stride = geometry.length, geometry.head, geometry.stride
    num_queries, of_row = geometry.queries, 3 * geometry.hidden
    sizes = {"kᵀ": head * stride, "v": length * head, "s": num_queries * stride, "factors": num_queries}
    code = Code(num_arguments=7)
    num_items, scratch, *arrays = code.arguments
    with code.every_piece() as piece:
        own = scratch_arrays(code, scratch, piece, sizes)
        with code.loop(*code.share(num_items, piece)) as at:
            item = _item(code, geometry, at, *arrays)
            transpose(code, length, head, item.key, of_row, own["kᵀ"], stride)
            copy(code, length, head, item.value, of_row, own["v"], head)
            with code.loop(number(0), number(length), num_queries) as first:
                num_keys = code.plus(first, number(num_queries)) if geometry.causal else number(length)
                queries = code.pointer(item.query, FLOAT, code.times(first, of_row))
                scores = (own["s"], stride)
                multiply(code, num_queries, head, num_keys, (queries, of_row, 1), (own["kᵀ"], stride), scores)
                with code.loop(number(0), number(num_queries)) as row:
                    factor = _weights(code, geometry, item, code.plus(first, row), _line(code, scores, row), num_keys)
                    code.store(factor, own["factors"], row)
                outputs = code.pointer(item.output, FLOAT, code.times(first, geometry.hidden))
                left, target = (own["s"], stride, 1), (outputs, geometry.hidden)
                factors = own["factors"]
                multiply(code, num_queries, num_keys, head, left, (own["v"], head), target, factors=factors)
    code.num_scratch = scratch_size(sizes)
    return code


@machine_code
def _backward(geometry: Geometry) -> Code:
    length, head, stride, hidden = geometry.length, geometry.head, geometry.stride, geometry.hidden
    num_queries, of_row = geometry.queries, 3 * geometry.hidden
    sizes = {"k": length * head, "kᵀ": head * stride, "vᵀ": head * stride}
    sizes |= {"dkᵀ": head * stride, "dvᵀ": head * stride, "s": num_queries * stride, "ds": num_queries * stride}
    code = Code(num_arguments=9)
    num_items, scratch, qkv, mask, seed, output, statistics, grad, of_qkv = code.arguments
    with code.every_piece() as piece:
        own = scratch_arrays(code, scratch, piece, sizes)
        with code.loop(*code.share(num_items, piece)) as at:
            item = _item(code, geometry, at, qkv, mask, seed, output, statistics)
            # The same places in the gradient arrays.
            back = _item(code, geometry, at, of_qkv, mask, seed, grad, statistics)
            transpose(code, length, head, item.key, of_row, own["kᵀ"], stride)
            transpose(code, length, head, item.value, of_row, own["vᵀ"], stride)
            copy(code, length, head, item.key, of_row, own["k"], head)
            with code.loop(number(0), number(head * stride), WIDTH) as place:
                code.store_vector(constant(0.0), own["dkᵀ"], place)
                code.store_vector(constant(0.0), own["dvᵀ"], place)
            with code.loop(number(0), number(length), num_queries) as first:
                num_keys = code.plus(first, number(num_queries)) if geometry.causal else number(length)
                queries, of_queries = (
                    code.pointer(part, FLOAT, code.times(first, of_row)) for part in (item.query, back.query)
                )
                outputs, grads = (
                    code.pointer(part, FLOAT, code.times(first, hidden)) for part in (item.output, back.output)
                )
                scores, of_scores = (own["s"], stride), (own["ds"], stride)
                multiply(code, num_queries, head, num_keys, (queries, of_row, 1), (own["kᵀ"], stride), scores)
                multiply(code, num_queries, head, num_keys, (grads, hidden, 1), (own["vᵀ"], stride), of_scores)
                with code.loop(number(0), number(num_queries)) as row:
                    shift = _dot(code, head, _line(code, (outputs, hidden), row), _line(code, (grads, hidden), row))
                    lines = _line(code, scores, row), _line(code, of_scores, row)
                    _score_gradients(code, geometry, item, code.plus(first, row), *lines, shift, num_keys)
                of_keys, of_values = (own["dkᵀ"], stride), (own["dvᵀ"], stride)
                multiply(code, head, num_queries, num_keys, (grads, 1, hidden), scores, of_values, onto=True)
                multiply(code, head, num_queries, num_keys, (queries, 1, of_row), of_scores, of_keys, onto=True)
                of_scores_left = (own["ds"], stride, 1)
                multiply(code, num_queries, num_keys, head, of_scores_left, (own["k"], head), (of_queries, of_row))
            transpose(code, head, length, own["dkᵀ"], stride, back.key, of_row)
            transpose(code, head, length, own["dvᵀ"], stride, back.value, of_row)
    code.num_scratch = scratch_size(sizes)
    return code


def _line(code: Code, matrix: tuple[Value, int], row: Value) -> Value:
    return code.pointer(matrix[0], FLOAT, code.times(row, matrix[1]))


def _dot(code: Code, size: int, left: Value, right: Value) -> Value:
    total = constant(0.0)
    for at in range(0, size, WIDTH):
        total = code.multiply_add(code.vector(left, number(at), WIDTH), code.vector(right, number(at), WIDTH), total)
    return across(code, total, code.ir.fadd)


def _seen(code: Code, geometry: Geometry, item: _Item, query: Value, column: Value, product: Value) -> Value:
    """Return the scores of WIDTH keys: scaled products, and minus infinity where the query may not attend."""
    build = code.ir
    score = build.fmul(product, constant(geometry.scale))
    hidden = constant(float("-inf"))
    if geometry.causal:
        lanes = ir.Constant(ir.VectorType(INT, WIDTH), list(range(WIDTH)))
        places = build.add(code.spread(build.trunc(column, INT), WIDTH), lanes)
        before = build.icmp_signed("<=", places, code.spread(build.trunc(query, INT), WIDTH))
        score = build.select(before, score, hidden)
    if geometry.masked:
        at = build.gep(item.mask, [code.plus(code.times(query, geometry.length), column)])
        allowed = build.load(build.bitcast(at, ir.VectorType(BYTE, WIDTH).as_pointer()), align=1)
        score = build.select(build.icmp_unsigned("!=", allowed, ir.Constant(allowed.type, [0] * WIDTH)), score, hidden)
    return score


def _pairs(
    code: Code, num_columns: Value, start: list[Value], turn: Callable[[int, Value, Value], Value]
) -> list[Value]:
    """Fold `turn(which, column, value)` over the vectors of a line, two at a time, each with a value of its own."""

    def both(index: Value, values: list[Value]) -> list[Value]:
        columns = [code.plus(code.times(index, PANEL), number(k * WIDTH)) for k in range(2)]
        return [turn(k, columns[k], values[k]) for k in range(2)]

    return code.fold(code.ir.udiv(num_columns, number(PANEL)), start, both)


def _key(code: Code, geometry: Geometry, item: _Item, query: Value) -> tuple[Value, Value]:
    return line_key(code, item.seed, code.plus(code.times(item.number, geometry.length), query))


def _weights(code: Code, geometry: Geometry, item: _Item, query: Value, line: Value, num_keys: Value) -> Value:
    """Turn a line of products into unscaled weights, and return the factor that scales them.

    The largest score and one over the sum of exponentials are kept for the backward pass.
    """
    build = code.ir

    def masked(which: int, column: Value, most: Value) -> Value:
        score = _seen(code, geometry, item, query, column, code.vector(line, column, WIDTH))
        code.store_vector(score, line, column)
        return larger(code, score, most)

    most = _pairs(code, num_keys, [constant(_LOWEST)] * 2, masked)
    highest = across(code, larger(code, *most), lambda a, b: larger(code, a, b))
    key = _key(code, geometry, item, query) if geometry.dropout else None

    def summed(which: int, column: Value, total: Value) -> Value:
        apart = build.fsub(code.vector(line, column, WIDTH), code.spread(highest, WIDTH))
        weight = exponential(code, apart)
        total = build.fadd(total, weight)
        if key is not None:
            stays = kept(code, key, column, threshold(geometry.dropout))
            weight = build.select(stays, weight, constant(0.0))
        code.store_vector(weight, line, column)
        return total

    total = across(code, build.fadd(*_pairs(code, num_keys, [constant(0.0)] * 2, summed)), build.fadd)
    nothing = build.fcmp_ordered("==", total, FLOAT(0.0))
    inverse = build.select(nothing, FLOAT(0.0), build.fdiv(FLOAT(1.0), total))
    at = code.times(query, 2)
    code.store(highest, item.statistics, at)
    code.store(inverse, item.statistics, code.plus(at, number(1)))
    return build.fmul(inverse, FLOAT(1 / (1 - geometry.dropout)))


def _score_gradients(
    code: Code,
    geometry: Geometry,
    item: _Item,
    query: Value,
    line: Value,
    of_line: Value,
    shift: Value,
    num_keys: Value,
) -> None:
    """Turn products into weights with dropout, and the gradients of weights into those of the products q kᵀ."""
    build = code.ir
    at = code.times(query, 2)
    highest = code.spread(code.load(item.statistics, at), WIDTH)
    inverse = code.spread(code.load(item.statistics, code.plus(at, number(1))), WIDTH)
    shift = code.spread(shift, WIDTH)
    key = _key(code, geometry, item, query) if geometry.dropout else None

    def turn(which: int, column: Value, value: Value) -> Value:
        score = _seen(code, geometry, item, query, column, code.vector(line, column, WIDTH))
        weight = build.fmul(exponential(code, build.fsub(score, highest)), inverse)
        grad, used = code.vector(of_line, column, WIDTH), weight
        if key is not None:
            stays = kept(code, key, column, threshold(geometry.dropout))
            larger_by = build.select(stays, constant(1 / (1 - geometry.dropout)), constant(0.0))
            grad, used = build.fmul(grad, larger_by), build.fmul(weight, larger_by)
        code.store_vector(used, line, column)
        of_score = build.fmul(weight, build.fsub(grad, shift))
        code.store_vector(build.fmul(of_score, constant(geometry.scale)), of_line, column)
        return value

    _pairs(code, num_keys, [number(0)] * 2, turn)


# --- modules ----------------------------------------------------------------------------------------------------------


def install(module: nn.Module) -> None:
    """Change a plain layer to one of the classes below."""
    if type(module) is SelfAttention:
        module.__class__ = _SelfAttention


class _SelfAttention(SelfAttention):
    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.scale is not None or leave_to_torch(x) or not fits(x.shape, self.heads, mask):
            return super().attend(x, mask)
        dropout = self.dropout if self.training else 0.0
        attended: Tensor = Attention.apply(self.qkv(x), mask, self.heads, self.causal, dropout)
        return attended
