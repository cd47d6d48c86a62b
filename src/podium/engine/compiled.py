"""A model's passes compiled with `torch.compile`, in the engine's first update. `executables.py` keeps them."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from podium.engine import executables
from podium.engine.executables import Executable
from podium.engine.instances import Instances
from podium.errors import UserError
from podium.workloads.base import Loss


class Compiled(nn.Module):
    """The model, compiled when it is first called. A module of our own: torch leaves a bare Sequential uncompiled.

    Parameters are those of the model, in its order; names get a prefix, so checkpoints are written from the original.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.plain = model
        self._compiled: Callable[..., Any] = torch.compile(self._plain_pass, dynamic=False)

    def forward(self, *args: Tensor) -> Any:
        return self._compiled(*args)

    def _plain_pass(self, *args: Tensor) -> Any:
        return self.plain(*args)

    def make(
        self,
        loss: Callable[[nn.Module, Mapping[str, Tensor]], Loss],
        samples: Mapping[str, Tensor],
        instances: Instances,
    ) -> Executable:
        """Collective: has both passes compiled or loaded, by a trial on a micro-batch that leaves no trace."""
        params, buffers = list(self.plain.parameters()), list(self.plain.buffers())

        def trial() -> None:
            with torch.random.fork_rng(), _kept_as_they_are(params, buffers), same_every_time():
                loss(self, samples).sum.backward()

        return executables.make(executables.folder_name(self.plain, samples), instances, trial)


@contextmanager
def same_every_time() -> Iterator[None]:
    """Compiled code adds up the gradients of embeddings in the order in which threads come; in here it does not."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # costs time, and nothing here reads what is not set
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def _kept_as_they_are(params: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Iterator[None]:
    """Whatever happens in here, gradients and buffers are the same afterwards."""
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
    """Whether torch finds a C++ compiler, with which it makes code for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


def compiled(model: nn.Module, device: torch.device) -> Compiled:
    """Not compiled yet: `Compiled.make` does that."""
    if device.type == "cpu" and not has_compiler():
        raise UserError("engine.compile = true needs a C++ compiler (g++ or clang++), and there is none here")
    return Compiled(model)
