"""What an instance holds of a model whose blocks are on several devices: all else is on torch's `meta` device, where
tensors have names, shapes and types but no memory."""

from collections.abc import Sequence

from torch import Tensor, nn


def let_go(blocks: Sequence[nn.Module]) -> None:
    """Frees the memory of blocks that other devices carry."""
    for block in blocks:
        block.to("meta")


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are here, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}


def elsewhere_of(model: nn.Module) -> set[str]:
    """Names of those that other devices hold."""
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}
