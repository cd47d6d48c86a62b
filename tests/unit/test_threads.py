"""Threads beside the training leave its OpenMP workers alone."""

import subprocess
import sys

import pytest

from podium.topology import usable_cores

#: prints how many threads each step has added to the process
SCRIPT = """
import os, tempfile, threading, torch
from pathlib import Path
from podium.checkpoint import CheckpointSection, Saver
from podium.data.arrays import Field
from podium.data.feed import Feed
from podium.optim.optimisers import OptimSection, build_optimiser
from podium.workloads.base import by_dimension

torch.set_num_threads(2)
model = torch.nn.Linear(2000, 2000)
optimiser = build_optimiser(OptimSection(name="adam", lr=0.1), model, by_dimension(model))
model(torch.rand(64, 2000)).sum().backward()

def num_threads():
    return len(os.listdir("/proc/self/task"))

class Source:
    fields = {"x": Field((2000,), "float32")}
    def __len__(self):
        return 64
    def gather(self, samples, out):
        torch.from_numpy(out["x"]).fill_(1.0).exp_()

before = num_threads()
with tempfile.TemporaryDirectory() as folder, Saver(Path(folder), CheckpointSection()) as saver:
    saver.save(1, model, optimiser, {}, None)
    saver.wait()
    print("saver", num_threads() - before)
    import numpy as np
    with Feed(Source(), iter([np.arange(64)] * 8), 64) as feed:
        iterator = iter(feed)
        next(iterator)
        print("feed", num_threads() - before)
print("cores", torch.get_num_threads())
"""


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core has no workers")
def test_the_feed_and_the_saver_are_one_thread_each():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["saver", "1", "feed", "2", "cores", "2"]
