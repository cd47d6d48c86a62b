"""Validation losses of the neuron inverter over ten seeds: Podium's engine against a plain PyTorch loop.

    python -m bench.batch_norm                 a few minutes; prints a table and writes bench/results/batch_norm.md
    python -m bench.batch_norm --quick         to see that it works, not to measure
    python -m bench.batch_norm --model full --micro 192 --samples 40000      the full model: hours on two cores

Both train the same architecture on the same simulated cells with AdamW at a constant rate of 1e-3, weight decay 0.01 on
every parameter and dropout 0.05 for 208 updates, and validate on the same cells. The plain loop shares no code with
Podium: its model is written here from torch's modules, its weights, orders and dropout are drawn by torch. So a seed of
one has nothing to do with the same seed of the other, and only the two distributions can be compared.

Each is validated twice: with the running statistics of batch norm, and with statistics recomputed over 50 micro-batches
of the training set (Podium: `valid.recalibrate`; the loop: `torch.optim.swa_utils.update_bn`). If running statistics
were kept differently, the first would differ and the second would not.

    python -m bench.batch_norm --paired        the sharper question; writes bench/results/batch_norm_paired.md

With --paired, the loop begins with Podium's weights and takes its samples, and both are without dropout: what is left
between the two is rounding, which 208 updates of AdamW enlarge, and whatever they do differently.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from bench.where import when_and_where
from podium.data.source import Source, empty_buffers
from podium.recipe.loading import Recipe, load_recipe, recipe_with
from podium.training.build import build_training
from podium.training.feeding import build_engine, samples_of_updates
from podium.training.validation import validate

RESULTS = Path(__file__).parent / "results"
NUM_UPDATES, NUM_RECALIBRATED, LR = 208, 50, 1e-3
#: filters, kernels, pools, linear layers
MODELS = {
    "small": ((4, 16, 32), (4, 2, 2), (4, 2, 2), (128, 128)),
    "full": ((30, 90, 180), (4, 4, 4), (4, 4, 4), (512, 512, 512, 256, 128)),
}


@dataclass(frozen=True)
class Losses:
    """The validation losses after one training."""

    running: float
    recalibrated: float


def recipe_of(model: str, micro: int, samples: int, seed: int, threads: int) -> Recipe:
    filters, kernels, pools, linear = (list(values) for values in MODELS[model])
    return load_recipe(
        "neuron/quick",
        [
            f"workload.model.filters={filters}",
            f"workload.model.kernels={kernels}",
            f"workload.model.pools={pools}",
            f"workload.model.linear={linear}",
            f"workload.data.samples={samples}",
            f"batch.micro={micro}",
            f"train.length={NUM_UPDATES}up",
            f"optim.lr={LR}",
            "optim.decay_all=true",
            "schedule.name=constant",
            "schedule.warmup=0",
            f"engine.threads={threads}",
            f"seed={seed}",
        ],
    )


def plain_model(model: str, dropout: float) -> nn.Sequential:
    filters, kernels, pools, linear = MODELS[model]
    layers: list[nn.Module] = []
    channels, bins = 4, 1600
    for width, kernel, pool in zip(filters, kernels, pools, strict=True):
        layers += [nn.Conv1d(channels, width, kernel), nn.MaxPool1d(pool), nn.ReLU()]
        channels, bins = width, (bins - kernel + 1) // pool
    features = channels * bins
    layers += [nn.Flatten(), nn.BatchNorm1d(features)]
    for width in linear:
        layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, 15))


class Loop:
    """A loop as anybody would write it, one update at a time."""

    def __init__(self, model: str, dropout: float) -> None:
        self.model = plain_model(model, dropout)
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)

    def begin_with(self, model: nn.Module) -> None:
        """Take the weights of another model, which has them in the same order."""
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), model.parameters(), strict=True):
                own.copy_(other)

    def step(self, frames: Tensor, target: Tensor) -> None:
        self._optimiser.zero_grad()
        F.mse_loss(self.model(frames.transpose(1, 2)), target).backward()
        self._optimiser.step()

    def losses(self, some: Iterable[Tensor], valid: tuple[Tensor, Tensor]) -> Losses:
        """Validate with the running statistics and with those of `some` micro-batches."""
        running = _validated(self.model, *valid)
        update_bn((frames.transpose(1, 2) for frames in some), self.model)
        return Losses(running, _validated(self.model, *valid))


def podium(recipe: Recipe, beside: Loop | None = None) -> Losses:
    """Train with the engine and validate with both kinds of statistics; `beside` begins with the same weights and gets
    the same samples."""
    training = build_training(recipe)
    if beside is not None:
        beside.begin_with(training.state.model)
    engine = build_engine(training)
    with samples_of_updates(training, 0, NUM_UPDATES) as all_samples:
        for update, samples in enumerate(all_samples):
            if beside is not None:
                beside.step(samples["frames"][0, 0], samples["target"][0, 0])
            engine.update(update, samples, training.state.schedule.lr(update))
    training.state.progress.update = NUM_UPDATES
    found = []
    for num_batches in (0, NUM_RECALIBRATED):
        validate(replace(training, recipe=recipe_with(recipe, {"valid.recalibrate": num_batches})))
        found.append(training.state.progress.valid_last["loss"])
    return Losses(*found)


def plain(model: str, micro: int, seed: int, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor]) -> Losses:
    """Train with the loop, with random numbers of its own."""
    torch.manual_seed(seed)
    loop = Loop(model, dropout=0.05)
    frames, target = train

    def batches(count: int) -> Iterator[Tensor]:
        """Yield the rows of so many micro-batches, from as many epochs as it takes."""
        per_epoch = len(frames) // micro
        for number in range(count):
            if number % per_epoch == 0:
                order = torch.randperm(len(frames))
            yield order[number % per_epoch * micro :][:micro]

    for rows in batches(NUM_UPDATES):
        loop.step(frames[rows], target[rows])
    return loop.losses((frames[rows] for rows in batches(NUM_RECALIBRATED)), valid)


@torch.inference_mode()
def _validated(model: nn.Module, frames: Tensor, target: Tensor) -> float:
    model.eval()
    parts = zip(frames.split(256), target.split(256), strict=True)
    total = sum(F.mse_loss(model(x.transpose(1, 2)), y, reduction="sum").item() for x, y in parts)
    model.train()
    return total / target.numel()


def tensors(source: Source) -> tuple[Tensor, Tensor]:
    out = empty_buffers(source.fields, len(source))
    source.gather(np.arange(len(source)), out)
    return torch.from_numpy(out["frames"]), torch.from_numpy(out["target"])


def table(ours: list[Losses], theirs: list[Losses]) -> str:
    """Format one row for each seed, then mean, standard deviation, and the difference of the means in units of its
    standard error."""
    lines = [
        "| seed | Podium, running | loop, running | Podium, recalibrated | loop, recalibrated |",
        "|---|---:|---:|---:|---:|",
    ]
    columns = [
        [one.running for one in ours],
        [one.running for one in theirs],
        [one.recalibrated for one in ours],
        [one.recalibrated for one in theirs],
    ]
    for seed, row in enumerate(zip(*columns, strict=True), start=1):
        lines.append(f"| {seed} | {' | '.join(f'{value:.4f}' for value in row)} |")
    lines.append(f"| mean | {' | '.join(f'{statistics.mean(column):.4f}' for column in columns)} |")
    lines.append(f"| standard deviation | {' | '.join(f'{statistics.stdev(column):.4f}' for column in columns)} |")
    lines.append("")
    for kind, left, right in (("running", columns[0], columns[1]), ("recalibrated", columns[2], columns[3])):
        error = (statistics.variance(left) / len(left) + statistics.variance(right) / len(right)) ** 0.5
        difference = statistics.mean(left) - statistics.mean(right)
        apart = statistics.mean(abs(one - other) for one, other in zip(left, right, strict=True))
        lines.append(
            f"With {kind} statistics, Podium's mean minus the loop's is {difference:+.4f}, with a standard error of "
            f"{error:.4f}: {difference / error:+.1f} of them. Row by row they are {apart:.4f} apart in the mean.\n"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds and few cells; writes nothing")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--paired", action="store_true", help="the same weights and samples for both, no dropout")
    args = parser.parse_args()
    samples, seeds = (1_000, 2) if args.quick else (args.samples, args.seeds)
    load, began = os.getloadavg()[0], time.perf_counter()
    torch.set_num_threads(args.threads)
    first = build_training(recipe_of(args.model, args.micro, samples, 1, args.threads))
    train, valid = (tensors(source) for source in (first.task.train_source, first.task.valid_source))
    ours, theirs = [], []
    for seed in range(1, seeds + 1):
        recipe = recipe_of(args.model, args.micro, samples, seed, args.threads)
        if args.paired:
            loop = Loop(args.model, dropout=0.0)
            ours.append(podium(recipe_with(recipe, {"workload.model.dropout": 0.0}), loop))
            theirs.append(loop.losses(train[0][: NUM_RECALIBRATED * args.micro].split(args.micro), valid))
        else:
            ours.append(podium(recipe))
            theirs.append(plain(args.model, args.micro, seed, train, valid))
        print(seed, ours[-1], theirs[-1], flush=True)
    what = "the same initial weights and samples for both, without dropout" if args.paired else "seeds of their own"
    text = (
        f"# Validation losses over {seeds} seeds\n\n{when_and_where(load)}. `python -m bench.batch_norm"
        f"{' --paired' if args.paired else ''} --seeds {seeds}`: the {args.model} neuron inverter on {samples:,} "
        f"simulated cells, micro-batch {args.micro}, {NUM_UPDATES} updates of AdamW at a constant {LR:g}, {what}; "
        f"validated on {len(valid[0]):,} cells; threads: {args.threads}; {time.perf_counter() - began:.0f} s.\n\n"
        + table(ours, theirs)
    )
    print(f"\n{text}")
    if not args.quick:
        path = RESULTS / f"batch_norm{'_paired' if args.paired else ''}.md"
        path.write_text(text)
        print("written to", path)


if __name__ == "__main__":
    main()
