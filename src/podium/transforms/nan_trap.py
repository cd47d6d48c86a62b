"""`precision.trap`: stops at the first value that is not finite and reports where it came from.

It only observes: operators that do the work of several layers stay in use and are checked as a whole, and compiled
models are checked from outside. So a run has the same bits with and without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import TrainingFailed
from podium.kernels.eligibility import Observer, observers
from podium.transforms.seeding import MicroBatch, entered


def apply_trap(model: nn.Module, *, backward: bool = True, compiled: bool = False) -> None:
    """Check the outputs of all layers, the gradients of these outputs, and the gradients of the weights.

    `backward=False` if the loss scale is found by letting gradients overflow. A `compiled` model has no layers to
    check: `engine/compile.py` passes on its output as a whole.
    """
    if compiled:
        model.register_forward_hook(_Watch("the compiled model", backward))
    else:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(_Watch(name or "the model", backward))
    if backward:
        trap_gradients(model)


def trap_gradients(model: nn.Module) -> None:
    """Check the gradients of the weights. Called again if other parameters replace a model's own."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_gradient_hook(f"the gradient of {name}"))


class _Watch(Observer):
    """The check of the output of one layer, or of several that run as one, starting with this layer."""

    def __init__(self, name: str, backward: bool) -> None:
        self.name, self._backward = name, backward

    def look(self, modules: Sequence[nn.Module], output: Any) -> None:
        micro_batch = entered()
        if torch.compiler.is_compiling() or micro_batch is None:  # a trial before the first update
            return
        layers = _layers(modules)
        for tensor in output if isinstance(output, tuple) else (output,):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            _check(tensor, f"the output of {layers}", micro_batch)
            if self._backward and tensor.requires_grad:
                tensor.register_hook(lambda grad: _check(grad, f"the gradient that reaches {layers}", micro_batch))


def _layers(modules: Sequence[nn.Module]) -> str:
    """Name one layer, or the first and the last of those that run as one."""
    ends = modules if len(modules) == 1 else (modules[0], modules[-1])
    names = [hook.name for module in ends for hook in observers(module) if isinstance(hook, _Watch)]
    kinds = [type(module).__name__.lstrip("_") for module in modules]
    return f"{' … '.join(names)} ({', '.join(kinds)})"


def _gradient_hook(what: str) -> Callable[[Tensor], None]:
    def look(param: Tensor) -> None:
        micro_batch = entered()
        if param.grad is not None and micro_batch is not None:
            _check(param.grad, what, micro_batch)

    return look


def _check(tensor: Tensor, what: str, micro_batch: MicroBatch) -> None:
    tensor = tensor.detach()
    if not bool(tensor.isfinite().all()):
        found = "NaN" if bool(tensor.isnan().any()) else "infinite"
        raise TrainingFailed(
            f"{what} is {found} in update {micro_batch.update + 1}, replica {micro_batch.replica}, "
            f"micro-batch {micro_batch.number} (precision.trap); the last good checkpoint is kept"
        )
