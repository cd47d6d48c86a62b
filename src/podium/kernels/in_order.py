"""Values in the order of their axes, whatever the layout in memory: what checkpoints hold, and what is digested."""

import torch
from torch import Tensor

from podium.kernels import registry

#: elements from which the faster copy pays, whose compiler takes a while to load
_LARGE = 1 << 20


def copy_in_order(tensor: Tensor, into: Tensor, *, later: bool = False) -> None:
    """Copy a tensor into one of the host that lies in the order of its axes; `later`: an accelerator may do it after
    the return, in line with what else it has to do."""
    faster = registry.find("conv3d_weight_copy") if _is_large_kernel(tensor) else None
    if faster is not None:
        faster.copy_kernel(tensor.detach(), into)
    else:
        into.copy_(tensor.detach(), non_blocking=later)


def in_order(tensor: Tensor) -> Tensor:
    """Return a tensor of the host that lies in the order of its axes: itself, or a copy."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.detach()
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_in_order(tensor, values)
    return values


def _is_large_kernel(tensor: Tensor) -> bool:
    """Return whether this is the kernel of a 3D convolution, laid out for its matrix products, and large enough for
    that to matter."""
    suits = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.dim() == 5
    return suits and tensor.numel() >= _LARGE and tensor.permute(2, 3, 4, 1, 0).is_contiguous()
