"""The sum over replicas as it is defined, to compare with how it is computed."""

import torch


def tree_of(values: list[torch.Tensor]) -> torch.Tensor:
    """The same sum written as a recursion: halves, the left one larger by one when the count is odd."""
    if len(values) == 1:
        return values[0]
    half = (len(values) + 1) // 2
    return tree_of(values[:half]) + tree_of(values[half:])
