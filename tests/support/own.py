"""Workloads of a user for tests: a file with a module beside it, and a recipe."""

from pathlib import Path

MODEL = '''\
"""A module beside the workload, which imports it."""
from torch import nn


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return x + self.linear(x).relu()
'''
WORKLOAD = """\
import numpy as np
from torch import nn

import podium
from blocks import Block


class Squares(podium.Workload):
    class ModelSection(podium.Section):
        hidden: int = 8

    class DataSection(podium.Section):
        samples: int = 128

    loss = "mse"

    def build_model(self):
        hidden = self.model.hidden
        return nn.Sequential(nn.Linear(3, hidden), Block(hidden), nn.Dropout(0.1), nn.Linear(hidden, 1))

    def source(self, split):
        random = np.random.default_rng({"train": 0, "valid": 1}[split])
        x = random.normal(size=(self.data.samples, 3))
        return x, (x**2).sum(axis=1)
"""
RECIPE = """\
workload: { name: mine.py }
batch: { micro: 4, replicas: 4 }
train: { length: 2ep }
optim: { name: adamw, lr: 1e-2 }
engine: { updates_per_call: 4, threads: 1 }
checkpoint: { every: 4up, keep: 20 }
log: { tensorboard: false, report: false }
"""


def write_own(folder: Path, workload: str = WORKLOAD, recipe: str = RECIPE) -> Path:
    """Writes the files of a workload; returns the recipe."""
    (folder / "blocks.py").write_text(MODEL)
    (folder / "mine.py").write_text(workload)
    (folder / "mine.yaml").write_text(recipe)
    return folder / "mine.yaml"
