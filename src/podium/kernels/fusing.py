"""Modules that run as one operator. `install.py` applies this to models; `conv/conv_pool.py` and `norm/batch_norm.py`
define which can be combined."""

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from podium.kernels import registry
from podium.kernels.eligibility import has_hooks, leave_to_torch, shown, stays_apart
from podium.layers.residual import ResidualBlock

#: the kernels that can do the work of several modules, in the order in which they are tried
_KERNELS = ("conv_pool", "batch_norm")
_Step = Callable[[Tensor], Tensor]


def install(module: nn.Module) -> None:
    """Change a plain sequence or residual block to one of the classes below."""
    if type(module) is nn.Sequential:
        module.__class__ = _Sequential
    elif type(module) is ResidualBlock:
        module.__class__ = _ResidualBlock


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


class _ResidualBlock(ResidualBlock):
    """A block that runs the branch's last batch norm, the sum and the ReLU as one operator where possible."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, branch, norm = registry.find("batch_norm"), self.branch, self.branch[-1]
        if kernel is None or leave_to_torch(x) or not isinstance(branch, _Sequential):
            return super().forward(x)
        if any(has_hooks(module) or stays_apart(module) for module in (branch, norm)):
            return super().forward(x)
        *steps, last = branch.steps()
        if last is not norm:
            return super().forward(x)
        before = x
        for step in steps:
            before = step(before)
        if not kernel.fits(norm, before):
            return F.relu(norm(before) + self.shortcut(x), inplace=True)
        return shown((norm,), kernel.apply(norm, before, self.shortcut(x), relu=True))


def _steps(modules: Sequence[nn.Module]) -> list[_Step]:
    """Plan the modules in order, combining those that one operator can run."""
    kernels = [kernel for name in _KERNELS if (kernel := registry.find(name)) is not None]
    steps: list[_Step] = []
    at = 0
    while at < len(modules):
        near = list(itertools.takewhile(lambda module: not stays_apart(module), modules[at : at + 3]))
        step = next((step for kernel in kernels if (step := kernel.step(near)) is not None), None)
        steps.append(modules[at] if step is None else step)
        at += 1 if step is None else step.num_modules
    return steps
