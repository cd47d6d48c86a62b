"""Small costs that every update or sample has: a step of small tensors, passes that are replayed, the order of samples.

    python -m bench.small_costs          some seconds; prints a table

A step updates eight small tensors, as in mnist, where Python is the whole cost: by Podium, which calls torch's kernels
directly, and by torch.optim.SGD(fused=True), alternately. An update of mnist with micro-batch 8, without its input,
takes processor time as it is and with replayed passes (`engine/replay.py`), alternately, with the same bits at the end.
The order is that of five million samples, on one core.
"""

import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from bench.where import when_and_where
from podium.contract import by_dimension
from podium.data.sample_order import order
from podium.optim.optimisers import build_optimiser, step
from podium.recipe.loading import load_recipe
from podium.recipe.sections.optim import OptimSection
from podium.training.build import build_training
from podium.training.feeding import build_engine

_ROUNDS, _STEPS = 30, 30
_NUM_SAMPLES, _POSITIONS = 5_000_000, 1 << 18


def step_seconds() -> tuple[float, float]:
    """Return the seconds of Podium's step and of torch's, the fastest of their rounds."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    theirs = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    theirs.grad_scale = divisor = torch.tensor(1.0)  # type: ignore[attr-defined]
    ours = build_optimiser(OptimSection(name="sgd", lr=1e-6), model, by_dimension(model))
    sides: tuple[Callable[[], object], ...] = (lambda: step(ours, divisor), theirs.step)
    fastest = [float("inf")] * len(sides)
    for _ in range(_ROUNDS):
        for number, run in enumerate(sides):
            start = time.perf_counter()
            for _ in range(_STEPS):
                run()
            fastest[number] = min(fastest[number], (time.perf_counter() - start) / _STEPS)
    return fastest[0], fastest[1]


def update_seconds() -> tuple[float, float]:
    """Return the processor time of an update with replayed passes and of one as it is, the fastest of their rounds."""
    case = ["workload.data.source=generated", "batch.micro=8", "schedule.warmup=0", "engine.threads=1"]
    trainings = [build_training(load_recipe("mnist", case)) for _ in range(2)]
    engines = [build_engine(training) for training in trainings]
    engines[1]._replicas.replay = None
    workload = trainings[0].task.workload
    draws = torch.Generator().manual_seed(0)
    example = workload.example(8)
    image = torch.rand(1, 1, *example["image"].shape, generator=draws)
    samples = {"image": image, "label": example["label"].expand(1, 1, -1)}
    fastest = [float("inf")] * len(engines)
    for first in range(0, _ROUNDS * _STEPS, _STEPS):
        for number, engine in enumerate(engines):
            start = time.thread_time()
            for update in range(first, first + _STEPS):
                engine.update(update, samples, 1e-3)
            fastest[number] = min(fastest[number], (time.thread_time() - start) / _STEPS)
    ours, theirs = (training.state.model.state_dict().values() for training in trainings)
    assert all(map(torch.equal, ours, theirs)), "replayed passes have other bits"
    return fastest[0], fastest[1]


def positions_per_second() -> float:
    """Return how many sample positions are computed per second, at best."""
    positions = np.arange(_POSITIONS)
    fastest = float("inf")
    for epoch in range(_ROUNDS):
        start = time.perf_counter()
        order(0, epoch, positions, _NUM_SAMPLES)
        fastest = min(fastest, time.perf_counter() - start)
    return _POSITIONS / fastest


def main() -> None:
    """Measure all of them and print the table."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    ours, theirs = step_seconds()
    print(when_and_where(load))
    print("| what | Podium | torch |\n|---|---|---|")
    print(f"| a step of eight small tensors, µs | {1e6 * ours:.1f} | {1e6 * theirs:.1f} ({theirs / ours:.2f} ×) |")
    ours, theirs = update_seconds()
    print(f"| an update of mnist, replayed against as it is, µs | {1e6 * ours:.0f} | {1e6 * theirs:.0f} as it is |")
    print(f"| positions of the order per second | {positions_per_second():,.0f} | |")


if __name__ == "__main__":
    main()
