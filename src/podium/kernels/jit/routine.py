"""Routines ready to run: what `llvm.py` wrote, compiled for this machine, or loaded from where an earlier process kept
it. Used by every kernel that has machine code.

Writing and compiling the routines of a small model takes as long as everything else until its first update but the
import of torch, and every process needs the same ones.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, cast

import llvmlite
import torch
from llvmlite import binding
from torch import Tensor

from podium.kernels.jit import kept_code
from podium.kernels.jit.llvm import WIDTH, Code
from podium.machine.recording import note

_P = ParamSpec("_P")


class Routine:
    """A routine in machine code."""

    def __init__(self, object_code: bytes, num_scratch: int) -> None:
        #: elements of scratch memory that each piece needs
        self.num_scratch = num_scratch
        # The engine owns the code, and the description of the machine that it is given.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
        self._engine.set_object_cache(getbuffer_func=lambda _: object_code)  # instead of that of the empty module
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("routine")
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_pieces: int, *arguments: int | Tensor) -> None:
        """Run all pieces, then return. Tensors are passed as the addresses of their first elements."""
        self._prepared(num_pieces, *arguments)()
        note(self._prepared, num_pieces, *arguments)

    def _prepared(self, num_pieces: int, *arguments: int | Tensor) -> Callable[[], None]:
        """Return what runs all pieces, any number of times, on tensors that it keeps."""
        next_piece = ctypes.c_int64(0)
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        passed = (ctypes.c_int64 * (2 + len(values)))(ctypes.addressof(next_piece), num_pieces, *values)
        address, kept = ctypes.addressof(passed), (passed, arguments)
        parallel, num_threads = _parallel(), min(num_pieces, torch.get_num_threads())

        def run(kept: object = kept) -> None:
            next_piece.value = 0
            if num_threads == 1 or parallel is None:
                self._call(address)
            else:
                parallel(self._address, address, num_threads, 0)

        return run


def machine_code(write: Callable[_P, Code]) -> Callable[_P, Routine]:
    """Make of a function that writes code one that returns the routine, compiled once for equal arguments.

    The arguments' text is part of the name under which it is kept, and so must tell them apart.
    """

    @functools.cache
    def made(*args: _P.args, **kwargs: _P.kwargs) -> Routine:
        text = repr((args, kwargs))
        assert " at 0x" not in text, "an address differs from process to process"
        name = f"{write.__module__.rpartition('.')[2]}{write.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        kept = kept_code.load(_version(), name)
        if kept is None:
            code = write(*args, **kwargs)
            kept = kept_code.Kept(_compiled(code), code.num_scratch)
            kept_code.keep(_version(), name, kept)
        return Routine(kept.object_code, kept.num_scratch)

    return cast("Callable[_P, Routine]", made)


def has_threads() -> bool:
    """Return whether routines run on all of torch's threads; otherwise on the calling one, with the same results."""
    return _parallel() is not None


def _compiled(code: Code) -> bytes:
    machine = _machine()
    module = binding.parse_assembly(str(code.module))
    module.verify()
    # The loops that matter are already vectorised.
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def _machine() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )


@functools.cache
def _version() -> str:
    """Return a digest of everything but its arguments that a routine's machine code depends on."""
    facts = [llvmlite.__version__, str(binding.llvm_version_info), binding.get_default_triple()]
    facts += [str(WIDTH), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    digest = hashlib.sha256("\n".join(facts).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Return what runs a function on all threads of torch's OpenMP; None if that is not GNU's or compatible."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function
