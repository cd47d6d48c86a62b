"""A model compiled with `torch.compile` in the engine's first update. `compile_cache.py` keeps the result."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from podium.contract import Loss
from podium.distributed.instances import Instances
from podium.engine import compile_cache
from podium.engine.compile_cache import Executable
from podium.errors import UserError
from podium.kernels.eligibility import has_hooks, shown


class Compiled(nn.Module):
    """The model, compiled when it is first called. Its own module, as torch leaves a bare Sequential uncompiled.

    Its parameters are those of the model, in the same order; their names get a prefix, so checkpoints are written from
    the original.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.plain = model
        self._compiled: Callable[..., Any] = torch.compile(self._plain_pass, dynamic=False)

    def forward(self, *args: Tensor) -> Any:
        return shown([self.plain], self._compiled(*args))

    def _plain_pass(self, *args: Tensor) -> Any:
        # Past observers, which would be compiled in and change bits; `forward` shows them what comes out.
        return self.plain(*args) if has_hooks(self.plain) else self.plain.forward(*args)

    def make(
        self,
        loss: Callable[[nn.Module, Mapping[str, Tensor]], Loss],
        samples: Mapping[str, Tensor],
        instances: Instances,
    ) -> Executable:
        """Compile or load both passes, by a trial run on a micro-batch that has no side effects. Collective."""
        params, buffers = list(self.plain.parameters()), list(self.plain.buffers())

        def trial() -> None:
            with torch.random.fork_rng(), kept_as_they_are(params, buffers), deterministic_algorithms():
                loss(self, samples).sum.backward()

        return compile_cache.make(compile_cache.folder_name(self.plain, samples), instances, trial)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make compiled code deterministic: otherwise it adds gradients of embeddings in the order threads arrive."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before == (True, False):  # more is asked already, as on accelerators
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling memory costs time, and nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def kept_as_they_are(params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore gradients and buffers on exit, whatever happens inside."""
    grads, values = [param.grad for param in params], [buffer.clone() for buffer in buffers]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def has_compiler() -> bool:
    """Return whether torch finds a C++ compiler, which it needs to compile for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


def compiled(model: nn.Module, device: torch.device) -> Compiled:
    """Wrap the model for compilation by `Compiled.make`; raise UserError if there is no compiler."""
    if device.type == "cpu" and not has_compiler():
        raise UserError("engine.compile = true needs a C++ compiler (g++ or clang++), and none was found")
    return Compiled(model)
