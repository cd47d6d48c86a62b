"""How much arithmetic and memory traffic the layers of a model need, counted, not measured.

Counted over the plain form of the model, as it would be without our kernels: two FLOPs for each multiply-add of matrix
products and convolutions. A kernel that gets by with fewer products (Winograd, say) is credited with those of the plain
form, as is usual, so it may pass the machine's peak. Bytes are the least there can be: every input, weight and output
of a layer once in the forward pass, and what the backward pass needs of them, whatever caches hold or lose.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from podium.contract import Workload
from podium.kernels import registry
from podium.recipe.loading import Recipe, recipe_with
from podium.training.build import build_model


@dataclass
class Work:
    """What the calls of one module need in one micro-batch, without the modules inside it."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    #: of each product: those of its two operands that need one, for which the backward pass has a product as large
    num_gradients: int = 2

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops

    @property
    def bytes(self) -> float:
        return self.forward_bytes + self.backward_bytes


def count_work(recipe: Recipe, workload: Workload, batch: Mapping[str, Tensor]) -> dict[str, Work]:
    """Return the work of each module by name, for one micro-batch. Takes a plain forward pass over it."""
    # `few_rows` changes what is computed, not how: without it there would be rows that nobody computes.
    kept = ["few_rows"] if "few_rows" in registry.chosen() else "off"
    used = registry.chosen()
    plain = recipe_with(
        recipe,
        {"engine.kernels": kept, "engine.compile": False, "precision.mode": "32.32", "parallel.recompute": False},
    )
    try:
        model, _ = build_model(plain, workload, torch.device("cpu"))
        found: dict[str, Work] = {}
        with _observed(model, found):
            forward = _counted(lambda: workload.loss(model, batch), model)
    finally:
        registry.use(sorted(used))
    for name, flops in forward.items():
        work = found.setdefault(name, Work())
        work.forward_flops, work.backward_flops = flops, flops * work.num_gradients
    return found


def _counted(run: Callable[[], object], model: nn.Module) -> dict[str, float]:
    """Return the FLOPs of each module without those inside it."""
    # The CPU's own attention kernel would not be counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    root = type(model).__name__
    inclusive = {
        name.removeprefix(root).removeprefix("."): float(sum(counts.values()))
        for name, counts in counter.get_flop_counts().items()
        if name == root or name.startswith(f"{root}.")
    }
    names = {name for name, _ in model.named_modules()}
    inclusive = {name: flops for name, flops in inclusive.items() if name in names}
    return {
        name: max(0.0, flops - sum(inclusive[other] for other in inclusive if _is_child(other, name, inclusive)))
        for name, flops in inclusive.items()
    }


def _is_child(name: str, parent: str, known: Mapping[str, float]) -> bool:
    """Return whether a module is the next one inside another, of those that are known."""
    if name == parent or not (parent == "" or name.startswith(f"{parent}.")):
        return False
    above = name.rpartition(".")[0]
    while above != parent:
        if above in known:
            return False
        above = above.rpartition(".")[0]
    return True


@contextmanager
def _observed(model: nn.Module, found: dict[str, Work]) -> Iterator[None]:
    """Note of every module what its products need gradients of, and, where no other is inside it, the least bytes."""
    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            own = list(module.parameters(recurse=False))
            work = found.setdefault(name, Work())
            # Products without weights of their own, as in attention, are of two tensors that were computed.
            work.num_gradients = _needs_gradient(inputs) + (not own or any(param.requires_grad for param in own))
            if next(module.children(), None) is None:
                weights, ins, outs = sum(map(_size, own)), _size(inputs), _size(output)
                work.forward_bytes += ins + weights + outs
                # read: inputs, weights, gradients of the outputs; written: gradients of inputs and weights
                work.backward_bytes += 2 * ins + 2 * weights + outs

        handles.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return any(map(_needs_gradient, value)) if isinstance(value, tuple | list) else False


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, tuple | list) else 0
