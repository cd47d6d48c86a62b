"""Machine code generated at run time, for the few loops that no torch operator does well. Used by
`kernels/conv/conv_pool_loops.py`, `kernels/conv/winograd.py`, and by the users of `vector_ops.py`.

llvmlite, on which numba is built, needs no compiler on the machine; numba itself offers no control over which values
stay in vector registers, and was slower here than the operators it was meant to replace.

A routine's work is divided into numbered pieces. The threads of torch's own OpenMP team take them one by one (other
threads would compete with the team for the cores), and a piece's result does not depend on which thread took it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
#: floats per vector: one register with AVX-512 or AVX2; elsewhere LLVM uses two registers, or half of one
WIDTH = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
Value = Any  # llvmlite's classes are built at run time: type checkers cannot see them


def number(value: int) -> Value:
    return ir.Constant(LONG, value)


class Code:
    """The writer of one routine. Indices and counts are 64-bit integers throughout; vectors are of floats."""

    def __init__(self, num_arguments: int) -> None:
        self.module = ir.Module()
        #: elements of scratch memory that each piece needs
        self.num_scratch = 0
        self._function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [LONG.as_pointer()]), "routine")
        self.ir = ir.IRBuilder(self._function.append_basic_block())
        passed = self._function.args[0]
        self._next_piece, self.num_pieces, *self.arguments = (
            self.load(passed, number(at)) for at in range(2 + num_arguments)
        )

    @contextmanager
    def every_piece(self) -> Iterator[Value]:
        """Loop over the pieces that are left and give each one's number; then the routine ends."""
        take, work, end = (self._function.append_basic_block() for _ in range(3))
        self.ir.branch(take)
        self.ir.position_at_end(take)
        counter = self.ir.inttoptr(self._next_piece, LONG.as_pointer())
        piece = self.ir.atomic_rmw("add", counter, number(1), "monotonic")
        self.ir.cbranch(self.ir.icmp_signed("<", piece, self.num_pieces), work, end)
        self.ir.position_at_end(end)
        self.ir.ret_void()
        self.ir.position_at_end(work)
        yield piece
        self.ir.branch(take)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        before = self.ir.block
        head, body, after = (self._function.append_basic_block() for _ in range(3))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index = self.ir.phi(LONG)
        index.add_incoming(start, before)
        self.ir.cbranch(self.ir.icmp_signed("<", index, stop), body, after)
        self.ir.position_at_end(body)
        yield index
        index.add_incoming(self.plus(index, number(step)), self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(after)

    def fold(
        self, num: Value, start: Sequence[Value], turn: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
        """Apply `turn` to `start` `num` times and return the result; the values stay in registers."""
        before = self.ir.block
        head, body, after = (self._function.append_basic_block() for _ in range(3))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        values = [self.ir.phi(value.type) for value in start]
        index = self.ir.phi(LONG)
        for phi, first in zip([*values, index], [*start, number(0)], strict=True):
            phi.add_incoming(first, before)
        self.ir.cbranch(self.ir.icmp_signed("<", index, num), body, after)
        self.ir.position_at_end(body)
        following = turn(index, values)
        for phi, value in zip([*values, index], [*following, self.plus(index, number(1))], strict=True):
            phi.add_incoming(value, self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(after)
        return values

    @contextmanager
    def function(self, *types: ir.Type) -> Iterator[Any]:
        """Write a function of its own inside the `with` block, and give it to be called from anywhere else."""
        name = f"part{len(self.module.functions)}"
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name)
        function.linkage = "internal"
        outside = self._function, self.ir
        self._function, self.ir = function, ir.IRBuilder(function.append_basic_block())
        yield function
        self.ir.ret_void()
        self._function, self.ir = outside

    def least(self, left: Value, right: Value) -> Value:
        return self.ir.select(self.ir.icmp_signed("<", left, right), left, right)

    def share(self, num: Value, piece: Value) -> tuple[Value, Value]:
        """Divide `num` items evenly among the pieces and return the start and end (exclusive) of this piece."""

        def start(number_of: Value) -> Value:
            return self.ir.sdiv(self.times(num, number_of), self.num_pieces)

        return start(piece), start(self.plus(piece, number(1)))

    def plus(self, left: Value, right: Value) -> Value:
        return self.ir.add(left, right, flags=["nsw"])

    def times(self, left: Value, right: Value | int) -> Value:
        return self.ir.mul(left, number(right) if isinstance(right, int) else right, flags=["nsw"])

    def pointer(self, address: Value, to: ir.Type, at: Value | None = None) -> Value:
        """Return a pointer to element `at` of an array whose address is an argument or a pointer."""
        if isinstance(address.type, ir.IntType):
            start = self.ir.inttoptr(address, to.as_pointer())
        else:
            start = self.ir.bitcast(address, to.as_pointer())
        return start if at is None else self.ir.gep(start, [at])

    def load(self, array: Value, at: Value) -> Value:
        return self.ir.load(self.ir.gep(array, [at]))

    def store(self, value: Value, array: Value, at: Value) -> None:
        self.ir.store(value, self.ir.gep(array, [at]))

    def vector(self, array: Value, at: Value, size: int) -> Value:
        """Load the elements `at` … of an array of floats."""
        return self.ir.load(self._vector_at(array, at, size), align=4)

    def store_vector(self, vector: Value, array: Value, at: Value) -> None:
        self.ir.store(vector, self._vector_at(array, at, vector.type.count), align=4)

    def _vector_at(self, array: Value, at: Value, size: int) -> Value:
        return self.ir.bitcast(self.ir.gep(array, [at]), ir.VectorType(FLOAT, size).as_pointer())

    def spread(self, value: Value, size: int) -> Value:
        """Return a vector with the same value in all places."""
        unset = ir.Constant(ir.VectorType(value.type, size), ir.Undefined)
        first = self.ir.insert_element(unset, value, ir.Constant(INT, 0))
        return self.ir.shuffle_vector(first, unset, ir.Constant(ir.VectorType(INT, size), [0] * size))

    def multiply_add(self, left: Value, right: Value, onto: Value) -> Value:
        """Return left · right + onto, rounded once if the processor can."""
        name = f"llvm.fmuladd.v{onto.type.count}f32"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(onto.type, [onto.type] * 3), name)
        return self.ir.call(function, [left, right, onto])
