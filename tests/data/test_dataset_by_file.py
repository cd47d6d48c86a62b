"""A Dataset in a user's own file, through the real command: exact on any count and after a kill, mistakes told."""

import re
from pathlib import Path

import pytest

from podium.runs.folder import Run
from tests.support.processes import assert_user_error, started

FILE = """
import os
import random
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import podium
from podium.recipe.section import Section

TRAINING = os.getpid()


class Noisy(Dataset):
    def __init__(self, num_samples, first, fails):
        self.num_samples, self.first, self.fails = num_samples, first, fails

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        number = index + self.first
        if number == 77 and self.fails == "raises":
            return {}["label"]
        if number == 77 and self.fails == "dies" and os.getpid() != TRAINING:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 77 and self.fails == "shape":
            return torch.zeros(9), 0
        noise = torch.randn(8) + float(np.random.normal()) + random.gauss(0, 1)
        return noise + number % 3, number % 3


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(8), 0


class Mine(podium.Workload):
    class DataSection(Section):
        workers: int = 0
        fails: str = ""

    loss = "cross_entropy"

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def source(self, split):
        if self.data.fails == "stream":
            return Stream()
        return Noisy(150, 0, self.data.fails) if split == "train" else Noisy(40, 1000, "")
"""
RECIPE = """
workload: {name: mine.py}
batch: {micro: 4, replicas: 4}
train: {length: 600up}
optim: {name: adamw, lr: 0.01}
valid: {every: 200up}
checkpoint: {every: 20up}
engine: {threads: 1, updates_per_call: 2}
log: {report: false, tensorboard: false}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
def test_weights_are_the_same_with_any_processes_and_instances_and_after_a_kill(folder, podium):
    digests = set()
    for number, form in enumerate(([], ["workload.data.workers=2"], ["workload.data.workers=1", "--instances", 2])):
        done = podium("train", "mine.yaml", *form, "--out", f"run-{number}")
        assert done.returncode == 0, done.stderr
        digests.add(Run(folder / f"run-{number}").summary()["weights_sha256"])
    with started("train", "mine.yaml", "workload.data.workers=2", "--out", "killed", cwd=folder) as running:
        running.until_records(folder / "killed", 2)
        running.kill_all()
    done = podium("resume", "killed")
    assert done.returncode == 0, done.stderr
    assert digests == {Run(folder / "killed").summary()["weights_sha256"]}


@pytest.mark.slow
def test_mistakes_of_a_dataset_are_told_with_the_users_own_lines(folder, podium):
    for workers in (0, 2):
        done = podium("train", "mine.yaml", "workload.data.fails=raises", f"workload.data.workers={workers}")
        assert_user_error(done, "sample 77 of Noisy raised KeyError: 'label'")
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("  ") and ".py:" in line]
        assert re.search(r"\bmine\.py:\d+, in", line)
        assert line.endswith('in __getitem__: return {}["label"]')
    assert_user_error(podium("train", "mine.yaml", "workload.data.fails=shape"), "sample 77 of Noisy has shape (9,)")
    assert_user_error(podium("train", "mine.yaml", "workload.data.fails=stream"), "Stream is an iterable dataset")
    done = podium("train", "mine.yaml", "workload.data.fails=dies", "workload.data.workers=2")
    assert done.returncode == 3, done.stderr
    assert "a process that prepares samples of Noisy was killed by SIGKILL while it prepared" in done.stderr
