"""The residual block."""

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut(x))"""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x), inplace=True)
