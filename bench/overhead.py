"""The engine against the loop a competent person writes by hand, with the same settings. The engine should reach 97 %.

    python bench/overhead.py            several minutes; prints a table and writes bench/results/overhead.md
    python bench/overhead.py --quick    a minute; to see that it works, not to measure

Engine: `podium.train.train` as a user runs it, with feed and telemetry, on samples from files, held in memory. Its rate
is that of its own records (training and input wait; the stretch contains neither validation nor checkpoint).
Loop: the same model from the same seed, samples as one float32 tensor per field in memory (converted beforehand, which
the engine does while it trains), a permutation per epoch, `x[indices]`, forward, mean loss, backward, torch's own fused
optimiser, `zero_grad(set_to_none=True)`. It keeps and reads no losses, and can neither stop nor resume.

Both run in this process, alternately, on the same number of threads; which goes first changes from round to round.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.data.formats.idx import write_idx
from podium.data.source import empty_buffers
from podium.recipe.loading import Recipe, load_recipe
from podium.runs.folder import environment
from podium.train import train
from podium.training.build import build_training
from podium.transforms.seeding import seed_torch
from podium.ui import console

RESULTS = Path(__file__).parent / "results" / "overhead.md"
TARGET = 0.97
#: updates between two records of the engine: as in the recipes, fewer if an update takes long
PER_CALL = {8: 50, 192: 10}

MEAN_LOSS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mnist": F.cross_entropy, "neuron": F.mse_loss}


@dataclass
class Case:
    """One recipe at one micro-batch, and its measurements."""

    recipe: Recipe
    name: str
    micro_batch: int
    #: updates in a stretch, and those before it that are not timed (on both sides; the engine's first two records)
    num_updates: int
    num_warmup: int
    engine: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [engine / loop for engine, loop in zip(self.engine, self.loop, strict=True)]

    @property
    def extra_us(self) -> float:
        """Return how many microseconds longer an update of the engine takes."""
        return 1e6 * self.micro_batch * (1 / statistics.median(self.engine) - 1 / statistics.median(self.loop))


def build_case(name: str, micro_batch: int, threads: int | None, per_call: int, folder: Path) -> Case:
    """Build the recipe that both sides follow; samples are made in `folder`."""
    workload = name.partition("/")[0]
    overrides = [f"batch.micro={micro_batch}", f"engine.updates_per_call={per_call}", "schedule.name=constant"]
    overrides += ["schedule.warmup=0", "valid.every=0", "valid.max_samples=8", "checkpoint.every=0"]
    overrides += ["log.report=false", "optim.decay_all=true"]
    overrides += [f"engine.threads={threads}"] if threads else []
    if workload == "mnist":
        overrides += [f"workload.data.path={folder / 'mnist'}"]
    else:
        overrides += ["workload.data.samples=4000"]
    return Case(load_recipe(name, overrides), name, micro_batch, per_call, 2 * per_call)


def write_images(folder: Path) -> None:
    """Write random images as MNIST's files: their content does not affect the time."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, num_samples in (("train", 60_000), ("t10k", 1_000)):
        images = draw.integers(0, 256, (num_samples, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", draw.integers(0, 10, num_samples, dtype=np.uint8))


# --- the engine -----------------------------------------------------------------------------------------------------


def engine_rate(case: Case, folder: Path) -> float:
    """Return the samples per second of `num_updates` updates in a run of its own."""
    tree = case.recipe.model_dump(by_alias=True)
    tree["train"]["length"] = f"{case.num_warmup + case.num_updates}up"
    recipe = type(case.recipe).model_validate(tree)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        records = train(recipe, Path(out) / "run").records()
    samples = seconds = 0.0
    for before, record in pairwise(records):
        if before["update"] >= case.num_warmup:
            new = record["samples"] - before["samples"]
            samples += new
            seconds += new / record["train/samples_per_second"]
    assert samples == case.num_updates * case.micro_batch
    return samples / seconds


# --- the loop -------------------------------------------------------------------------------------------------------


class Loop:
    """The hand-written side: everything it needs is in memory."""

    def __init__(self, recipe: Recipe) -> None:
        training = build_training(recipe)  # sets the number of threads, too
        self._recipe, self._build_model = recipe, training.task.workload.build_model
        self._mean_loss = MEAN_LOSS[recipe.workload.name]
        self._num_samples = len(training.task.train_source)
        buffers = empty_buffers(training.task.train_source.fields, self._num_samples)
        for start in range(0, self._num_samples, 1024):
            rows = np.arange(start, min(start + 1024, self._num_samples))
            training.task.train_source.gather(
                rows, {name: buffer[rows[0] : rows[-1] + 1] for name, buffer in buffers.items()}
            )
        self._inputs, self._targets = (torch.from_numpy(buffer) for buffer in buffers.values())
        self._threads = training.placement.threads

    def rate(self, case: Case) -> float:
        """Return the samples per second over the updates of a stretch, after the warm-up."""
        torch.set_num_threads(self._threads)
        micro_batch = self._recipe.batch.micro_batch
        seed_torch(torch.device("cpu"), "weights", self._recipe.seed)
        model = self._build_model().train()
        optimiser = self._build_optimiser(model)
        self._train(model, optimiser, micro_batch, case.num_warmup)
        began = time.perf_counter()
        self._train(model, optimiser, micro_batch, case.num_updates)
        return case.num_updates * micro_batch / (time.perf_counter() - began)

    def _train(self, model: nn.Module, optimiser: torch.optim.Optimizer, micro_batch: int, num_updates: int) -> None:
        inputs, targets, mean_loss = self._inputs, self._targets, self._mean_loss
        last = self._num_samples - micro_batch
        start, order = last + 1, torch.empty(0)
        for _ in range(num_updates):
            if start > last:
                start, order = 0, torch.randperm(self._num_samples)
            indices = order[start : start + micro_batch]
            start += micro_batch
            loss = mean_loss(model(inputs[indices]), targets[indices])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def _build_optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        section = self._recipe.optim
        options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.value("weight_decay"), "fused": True}
        if section.name == "adamw":
            return torch.optim.AdamW(model.parameters(), betas=section.value("betas"), **options)
        assert section.name in ("sgd", "momentum")
        momentum = section.value("momentum") if section.name == "momentum" else 0.0
        return torch.optim.SGD(model.parameters(), momentum=momentum, **options)


# --- measuring and reporting ----------------------------------------------------------------------------------------


def measure(case: Case, rounds: int, stretch_s: float, folder: Path) -> None:
    """Run an untimed round to warm up and to choose the length of a stretch, then `rounds` alternating ones."""
    loop = Loop(case.recipe)
    engine_rate(case, folder)
    per_call = case.recipe.engine.updates_per_call
    case.num_updates = per_call * max(1, round(stretch_s * loop.rate(case) / case.micro_batch / per_call))
    for number in range(rounds):
        if number % 2:
            case.loop.append(loop.rate(case))
        case.engine.append(engine_rate(case, folder))
        if not number % 2:
            case.loop.append(loop.rate(case))
        print(
            f"{case.name} micro-batch {case.micro_batch}, round {number + 1} of {rounds}: "
            f"engine {case.engine[-1]:,.0f}, loop {case.loop[-1]:,.0f} samples/s, {case.ratios[-1]:.1%}",
            flush=True,
        )


def table(cases: list[Case]) -> str:
    """Format the medians over the rounds; ratios are taken within each round, so a slow minute affects both sides."""
    lines = [
        "| recipe | micro-batch | updates | engine, samples/s | loop, samples/s | engine / loop | least … most "
        "| extra per update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        ratios = case.ratios
        lines.append(
            f"| {case.name} | {case.micro_batch} | {case.num_updates:,} | {statistics.median(case.engine):,.0f} "
            f"| {statistics.median(case.loop):,.0f} | {statistics.median(ratios):.1%} "
            f"| {min(ratios):.1%} … {max(ratios):.1%} | {case.extra_us:+,.0f} µs |"
        )
    return "\n".join(lines) + "\n"


def page(cases: list[Case], rounds: int, threads: int, load: float) -> str:
    """Format the table with when, where and how it was measured."""
    machine = environment(threads, torch.device("cpu"))
    return (
        f"# The engine against a hand-written loop\n\n"
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}; {machine['processor']}, {machine['num_cores']} cores, "
        f"{machine['instruction_set']}, threads per replica: {threads}, load {load:.2f} at the start; "
        f"torch {machine['torch']}, Podium {machine['podium']}. Medians of {rounds} rounds; target {TARGET:.0%}. "
        f"Made by `python bench/overhead.py`, whose first lines say what is compared.\n\n{table(cases)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine against a hand-written PyTorch loop.")
    parser.add_argument("--recipes", nargs="+", default=["mnist", "neuron/quick"], help="shipped recipes to compare on")
    parser.add_argument("--micro", nargs="+", type=int, default=[8, 192], help="micro-batches")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one stretch of one side")
    parser.add_argument("--threads", type=int, help="threads [default: all cores]")
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds of short stretches; no file unless --out is given"
    )
    parser.add_argument("--out", type=Path, help="file for the result [default: bench/results/overhead.md]")
    options = parser.parse_args()
    rounds, stretch_s = (3, 0.2) if options.quick else (options.rounds, options.seconds)
    console.err.quiet = True  # no progress lines
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is busy (load {load:.2f}): the numbers will say little")
    cases = []
    with tempfile.TemporaryDirectory(prefix="podium-overhead-") as name:
        folder = Path(name)
        write_images(folder / "mnist")
        for recipe in options.recipes:
            for micro_batch in options.micro:
                per_call = 5 if options.quick else PER_CALL.get(micro_batch, 20)
                cases.append(build_case(recipe, micro_batch, options.threads, per_call, folder))
                measure(cases[-1], rounds, stretch_s, folder)
    text = page(cases, rounds, torch.get_num_threads(), load)
    print(f"\n{text}")
    out = options.out or (None if options.quick else RESULTS)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        print(f"written to {out}")
    missed = [f"{case.name} {case.micro_batch}" for case in cases if statistics.median(case.ratios) < TARGET]
    print(f"below {TARGET:.0%}: {', '.join(missed)}" if missed else f"all at {TARGET:.0%} or above")


if __name__ == "__main__":
    main()
