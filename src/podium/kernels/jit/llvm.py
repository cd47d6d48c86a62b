"""Machine code generated at run time, for the few loops that no torch operator does well. Used by
`kernels/conv/conv_pool_loops.py`, `kernels/norm/batch_norm_relu.py`, `kernels/conv/winograd.py`, and by the users of
`vector_ops.py`.

llvmlite, on which numba is built, needs no compiler on the machine; numba itself offers no control over which values
stay in vector registers, and was slower here than the operators it was meant to replace.

A routine's work is divided into numbered pieces. The threads of torch's own OpenMP team take them one by one (other
threads would compete with the team for the cores), and a piece's result does not depend on which thread took it.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import binding, ir
from torch import Tensor

BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
WIDTH = 8  # floats per vector: one AVX register; elsewhere LLVM uses two registers, or half of one
Value = Any  # llvmlite's classes are built at run time: type checkers cannot see them


def number(value: int) -> Value:
    return ir.Constant(LONG, value)


class Code:
    """The writer of one routine. Indices and counts are 64-bit integers throughout; vectors are of floats."""

    def __init__(self, num_arguments: int) -> None:
        self.module = ir.Module()
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


class Routine:
    """A routine written by `Code`, compiled for this machine."""

    def __init__(self, code: Code) -> None:
        machine = _machine()
        module = binding.parse_assembly(str(code.module))
        module.verify()
        # The loops that matter are already vectorised.
        options = binding.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.loop_unrolling = False
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        self._engine = binding.create_mcjit_compiler(module, machine)  # owns the code
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("routine")
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_pieces: int, *arguments: int | Tensor) -> None:
        """Run all pieces, then return. Tensors are passed as the addresses of their first elements."""
        next_piece = ctypes.c_int64(0)
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        passed = (ctypes.c_int64 * (2 + len(values)))(ctypes.addressof(next_piece), num_pieces, *values)
        parallel = _parallel()
        num_threads = min(num_pieces, torch.get_num_threads())
        if num_threads == 1 or parallel is None:
            self._call(ctypes.addressof(passed))
        else:
            parallel(self._address, ctypes.addressof(passed), num_threads, 0)


def has_threads() -> bool:
    """Return whether routines run on all of torch's threads; otherwise on the calling one, with the same results."""
    return _parallel() is not None


@functools.cache
def _machine() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Return what runs a function on all threads of torch's OpenMP; None if that is not GNU's or compatible."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function
