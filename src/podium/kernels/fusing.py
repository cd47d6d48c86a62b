"""Consecutive modules that run as one operator. `install.py` applies this to models; `conv/conv_pool.py` defines which
modules can be combined."""

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from podium.kernels import registry
from podium.kernels.eligibility import leave_to_torch, stays_apart

_Step = Callable[[Tensor], Tensor]


def install(module: nn.Module) -> None:
    """Change a plain sequence to the class below."""
    if type(module) is nn.Sequential:
        module.__class__ = _Sequential


class _Sequential(nn.Sequential):
    """A sequence that runs consecutive modules as one operator where possible."""

    _planned: tuple[nn.Module, ...] = ()
    _steps: list[_Step]

    def forward(self, input: Tensor) -> Tensor:
        if leave_to_torch(input):
            return super().forward(input)
        for step in self.steps():
            input = step(input)
        return input

    def steps(self) -> list[_Step]:
        """Return the modules in order, with steps in place of those that are combined."""
        modules = tuple(self._modules.values())
        if modules != self._planned:
            self._planned, self._steps = modules, _steps(modules)
        return self._steps


def _steps(modules: Sequence[nn.Module]) -> list[_Step]:
    """Plan the modules in order, combining those that one operator can run."""
    kernel = registry.find("conv_pool")
    steps: list[_Step] = []
    at = 0
    while at < len(modules):
        near = list(itertools.takewhile(lambda module: not stays_apart(module), modules[at : at + 3]))
        step = kernel.step(near) if kernel is not None else None
        steps.append(modules[at] if step is None else step)
        at += 1 if step is None else step.num_modules
    return steps
