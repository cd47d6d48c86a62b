"""Tensors whose channels are adjacent in memory, as convolutions and our own operators on images take them.

n samples, c channels, h × w positions
"""

import torch
from torch import Tensor


def channels_innermost(weight: Tensor) -> Tensor:
    """Return (out, in, …) with the same values and the elements of `in` adjacent in memory."""
    return weight.movedim(1, -1).contiguous().movedim(-1, 1)


def channels_last(tensor: Tensor) -> Tensor:
    """Return (n, c, h, w) with channels-last strides.

    A tensor of one channel or one position has both layouts at once; torch decides by its strides.
    """
    _, c, h, w = tensor.shape
    stride = (c * h * w, 1, c * w, c)
    if tensor.stride() == stride:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)


def channels_last_empty(*shape: int) -> Tensor:
    """Return an empty float tensor (n, c, h, w) on the CPU, whose memory order is (n, h, w, c)."""
    _, c, h, w = shape
    return torch.empty_strided(shape, (c * h * w, 1, c * w, c))
