"""Faster forms of plain modules, applied to a model from outside. Called by `transforms/apply.py` before anything else.

Models stay plain: their modules change class in place, to subclasses of the plain ones, so parameters keep their names
and shapes, and a checkpoint is the same for every layout. Strides of convolution weights do change.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from podium.kernels import fusing, registry
from podium.kernels.conv import modules as convolutions
from podium.kernels.eligibility import keep_apart
from podium.layers.transformer import FewRows

Layout = Literal["default", "channels_last"]
#: kernels that replace single modules; `vocabulary` first takes the linear layers that it is made for
_OF_MODULES = ("conv3d_stride2", "batch_norm", "attention", "dropout_gelu", "vocabulary", "products")


def resolve_layout(choice: Literal["auto"] | Layout, device: torch.device, half: bool) -> Layout:
    """Return the layout; `auto` gives the fastest for the device type, for any model. It is part of the numerics.

    `half`: whether the arithmetic is in half precision, for which CUDA devices have units that read channels last.
    """
    if choice != "auto":
        return choice
    return "channels_last" if device.type == "cpu" or (device.type == "cuda" and half) else "default"


def apply_layout(model: nn.Module, layout: Layout, blocks: Sequence[nn.Module] = (), *, on_cpu: bool = True) -> None:
    """Set the memory layout of the convolutions and pools of `model`, and apply the kernels in use to its layers, which
    are for processors: on a device, only the layout changes.

    Only modules whose class is exactly a plain one change it, so this comes before anything else that changes classes.
    No operator crosses the boundaries of `blocks`. With the default layout, all layers are left to torch.
    """
    if not on_cpu:  # there, the layout that leaves all layers to torch is the usual one
        leave_out_rows(model)
    if layout == "default":
        return
    if not on_cpu:
        for module in model.modules():
            convolutions.install(module)
        return
    keep_apart(blocks)
    kernels = [kernel for name in _OF_MODULES if (kernel := registry.find(name)) is not None]
    leave_out_rows(model)
    for module in model.modules():
        convolutions.install(module)
        fusing.install(module)
        for kernel in kernels:
            kernel.install(module)


def leave_out_rows(model: nn.Module) -> None:
    """Let layers compute only the rows that somebody looks at, if that is among what is in use: a saving on any device,
    whatever the layout."""
    few_rows = registry.find("few_rows") is not None
    for module in model.modules():
        if isinstance(module, FewRows):
            module.only_needed = few_rows
