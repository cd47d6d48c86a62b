"""When our own operators step aside. Asked by those that are put on models, `operators.py` and `transformers.py`."""

import torch
from torch import Tensor, nn


def leave_to_torch(input: Tensor) -> bool:
    """Our own operators are for training in float32 on a CPU."""
    return is_foreign(input) or not torch.is_grad_enabled()


def is_foreign(input: Tensor) -> bool:
    """Those for float32 on a CPU, whether it trains or not."""
    if input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return True
    return torch.compiler.is_compiling()


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes through this very module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
