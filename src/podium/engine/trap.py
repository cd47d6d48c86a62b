"""`precision.trap`: stops at the first value that is not finite and says where it came from."""

from typing import Any

from torch import Tensor, nn

from podium.errors import TrainingFailed


class Trap:
    """Looks at the outputs of all layers, at the gradients that come back to them, and at those of the weights."""

    def __init__(self, model: nn.Module, *, backward: bool = True) -> None:
        """`backward=False` where the scale of the loss is found by letting gradients overflow."""
        self._place = ""
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._hook(name or "the model", backward))
        if backward:
            for name, param in model.named_parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._look(f"the gradient of {name}"))

    def enter(self, update: int, replica: int, index: int) -> None:
        """What is looked at from now on."""
        self._place = f"update {update + 1}, replica {replica}, micro-batch {index}"

    def _hook(self, name: str, backward: bool) -> Any:
        def look(module: nn.Module, inputs: object, output: Any) -> None:
            kind = type(module).__name__.lstrip("_")
            for tensor in output if isinstance(output, tuple) else (output,):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    continue
                self._check(tensor, f"the output of {name} ({kind})")
                if backward and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._check(grad, f"the gradient that reaches {name} ({kind})"))

        return look

    def _look(self, what: str) -> Any:
        return lambda param: self._check(param.grad, what)

    def _check(self, tensor: Tensor, what: str) -> None:
        if not bool(tensor.isfinite().all()):
            found = "NaN" if bool(tensor.isnan().any()) else "infinite"
            raise TrainingFailed(
                f"{what} is {found} in {self._place} (precision.trap); the last good checkpoint is kept"
            )
