"""What runs beside training, or begins it, takes no more than it needs."""

import subprocess
import sys

import pytest
import torch

from podium.recipe.loading import load_recipe
from podium.topology import usable_cores
from podium.training.build import build_training
from podium.transforms.thread_budget import busy_threads
from podium.workloads.registry import workload_class

#: prints how many threads each step has added to the process
SCRIPT = """
import os, tempfile, threading, torch
from pathlib import Path
from podium.recipe.sections.checkpoint import CheckpointSection
from podium.checkpoints.writing import Saver
from podium.data.source import Field, SampleRequest
from podium.data.feed import Feed
from podium.optim.optimisers import build_optimiser
from podium.recipe.sections.optim import OptimSection
from podium.contract import by_dimension

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
    def gather(self, samples, out, places=None):
        torch.from_numpy(out["x"]).fill_(1.0).exp_()

before = num_threads()
with tempfile.TemporaryDirectory() as folder, Saver(Path(folder), CheckpointSection()) as saver:
    saver.save(1, model, optimiser, {}, None)
    saver.wait()
    print("saver", num_threads() - before)
    import numpy as np
    with Feed(Source(), iter([SampleRequest(np.arange(64))] * 8), 64) as feed:
        iterator = iter(feed)
        next(iterator)
        print("feed", num_threads() - before)
print("cores", torch.get_num_threads())
"""


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core has no workers")
@pytest.mark.slow
def test_the_feed_and_the_saver_are_one_thread_each():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["saver", "1", "feed", "2", "cores", "2"]


@pytest.mark.parametrize(
    ("recipe", "micro", "threads", "busy"),
    [
        ("mnist", 8, 2, 1),
        ("mnist", 64, 2, 2),
        ("mnist", 64, 64, 10),
        ("mnist", 8, 1, 1),
        ("neuron/quick", 64, 2, 2),
        ("neuron/lstm", 64, 32, 32),  # its recurrent layer counts
    ],
)
def test_a_replica_keeps_as_many_threads_busy_as_its_micro_batches_are_worth(recipe, micro, threads, busy):
    loaded = load_recipe(recipe, ["workload.data.source=generated"])
    workload = workload_class(loaded.workload.name)(loaded.workload.model, loaded.workload.data)
    model = workload.build_model().train()
    before = [buffer.clone() for buffer in model.buffers()]
    assert busy_threads(threads, workload, model, micro) == busy
    assert model.training
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize(("given", "busy"), [("auto", 1), ("2", 2)])
def test_a_number_of_threads_in_the_recipe_is_taken_as_it_is(given, busy, monkeypatch):
    monkeypatch.setattr("podium.training.build.usable_cores", lambda: (0, 1))
    recipe = load_recipe("mnist", ["workload.data.source=generated", "batch.micro=8", f"engine.threads={given}"])
    before = torch.get_num_threads()
    try:
        training = build_training(recipe)
        assert (training.placement.threads, training.placement.busy_threads, torch.get_num_threads()) == (2, busy, busy)
    finally:
        torch.set_num_threads(before)


FIRST_UPDATE = """
import sys
from podium.training.build import build_training
from podium.recipe.loading import load_recipe
from podium.training.feeding import build_engine
training = build_training(load_recipe("mnist", ["workload.data.source=generated"]))
example = training.task.workload.example(8)
build_engine(training).update(0, {name: rows[None, None] for name, rows in example.items()}, 0.1)
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "matplotlib") if name in sys.modules])
"""


@pytest.mark.slow
def test_the_first_update_loads_no_compiler():
    """torch's takes longer to load than all else until the first update."""
    done = subprocess.run([sys.executable, "-c", FIRST_UPDATE], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_the_training_keeps_its_threads_when_another_thread_starts_with_one():
    """In a new process, where nothing has been computed yet."""
    code = """
import threading, torch
from podium.machine.threads import stay_single, use_threads
use_threads(2)
beside = threading.Thread(target=stay_single)
beside.start()
beside.join()
(torch.ones(512, 512) @ torch.ones(512, 512)).sum()
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
