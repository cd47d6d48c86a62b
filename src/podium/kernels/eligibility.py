"""When our own operators leave the work to torch, and how they serve hooks that observe modules. Used by the layers of
the kernels, by `install.py`, and by the kernels themselves."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def leave_to_torch(input: Tensor) -> bool:
    """Return whether torch must do the work: our own operators are for training in float32 on a CPU."""
    return is_foreign(input) or not torch.is_grad_enabled()


def is_foreign(input: Tensor) -> bool:
    """Return whether our own operators cannot take the input: they need float32 on a CPU, in training or not."""
    if input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return True
    return torch.compiler.is_compiling()


class Observer(ABC):
    """A forward hook that only reads the output of a module.

    Operators that do the work of several modules stay in use despite it, because leaving the work to torch would change
    bits; instead they show it what they have computed (`shown`).
    """

    def __call__(self, module: nn.Module, inputs: object, output: Any) -> None:
        self.look([module], output)

    @abstractmethod
    def look(self, modules: Sequence[nn.Module], output: Any) -> None:
        """Look at the output of modules that ran as one; this observer's own is the first of them."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook reads or changes what passes through this module, observers aside."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(not isinstance(hook, Observer) for hook in module._forward_hooks.values())


def hook_lists(model: nn.Module) -> list[Collection[Any]]:
    """Return all hooks on the modules, and on the gradients of the parameters as far as they are there now; these
    collections change as hooks come and go."""
    found: list[Collection[Any]] = []
    for module in model.modules():
        found += [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
    return found + [hooks for param in model.parameters() if (hooks := param._backward_hooks) is not None]


def is_watched(model: nn.Module) -> bool:
    """Return whether a hook looks at any part of the model, but for those that note what they do when a pass is
    recorded (`machine/recording.py`)."""
    every = [hook for hooks in hook_lists(model) if isinstance(hooks, Mapping) for hook in hooks.values()]
    return not all(getattr(hook, "notes_itself", False) for hook in every)


def shown(modules: Sequence[nn.Module], output: T) -> T:
    """Return `output`, the output of modules that ran as one, after the first module's observers have seen it."""
    for observer in observers(modules[0]):
        observer.look(modules, output)
    return output


def observers(module: nn.Module) -> list[Observer]:
    """Return the observers of a module's output."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, Observer)]


def keep_apart(blocks: Sequence[nn.Module]) -> None:
    """Forbid operators that combine the work of these modules with that of others.

    A model that is cut into stages calls its blocks one by one, and bits must not depend on that.
    """
    for block in blocks:
        vars(block)["stays_apart"] = True


def stays_apart(module: nn.Module) -> bool:
    return "stays_apart" in vars(module)
