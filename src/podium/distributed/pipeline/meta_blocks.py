"""The local part of a model whose blocks are on several devices. All other blocks are on torch's `meta` device, where
tensors have shapes and types but no memory."""

from collections.abc import Sequence

from torch import Tensor, nn


def free_blocks(blocks: Sequence[nn.Module]) -> None:
    """Free the memory of blocks that other devices hold."""
    for block in blocks:
        block.to("meta")


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers on this instance, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}


def remote_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that other devices hold."""
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}
