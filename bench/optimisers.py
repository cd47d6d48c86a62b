"""LARS and LAMB against those of the package pytorch_optimizer: the cost of a step, and whether it follows the papers.

    python -m bench.optimisers           a minute; prints tables and writes bench/results/optimisers.md

A step updates ResNet-50's parameters, 161 tensors with 25.6 million values, in float32; the two alternate, and which
goes first changes from round to round. Gradients are filled in again before every step, outside the timed part. On one
thread by default, where processor time distinguishes the two even on a busy machine.

The papers' formulas are below, written out in numpy: the tests compare our optimisers with them, the second table
compares both sides. Deviations are those of the weights in float64, relative to how far the formula has moved them.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench.where import when_and_where
from podium.contract import by_dimension
from podium.machine.allocator import keep_memory
from podium.optim.optimisers import build_optimiser, step
from podium.recipe.sections.optim import OptimSection

RESULTS = Path(__file__).parent / "results" / "optimisers.md"
PACKAGE = "pytorch_optimizer"
CLASSES = {"lars": "LARS", "lamb": "Lamb"}
#: largest deviation that counts as the same formula
CLOSE = 1e-6

Array = NDArray[np.float64]


def lars_by_the_paper(
    weight: Array,
    grad: Array,
    state: Sequence[Array],
    num_steps: int,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    eeta: float = 0.001,
    eps: float = 0.0,
    adapt: bool = True,
) -> tuple[Array, list[Array]]:
    """Return (weight, state) after a step by You, Gitman, Ginsburg 2017; `state` is (v,), zero before the first step.

    Without `adapt`, as a bias is treated: neither weight decay nor trust ratio.
    """
    (v,) = state
    decay = weight_decay if adapt else 0.0
    of_weight, of_grad = np.linalg.norm(weight), np.linalg.norm(grad)
    trust = 1.0
    if adapt and of_weight > 0 and of_grad > 0:
        trust = float(eeta * of_weight / (of_grad + decay * of_weight + eps))
    v = momentum * v + lr * trust * (grad + decay * weight)
    return weight - v, [v]


def lamb_by_the_paper(
    weight: Array,
    grad: Array,
    state: Sequence[Array],
    num_steps: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adapt: bool = True,
) -> tuple[Array, list[Array]]:
    """Return (weight, state) after step `num_steps` (from 1) by You et al. 2020; `state` is (m, v), zero at first.

    Without `adapt`, as a bias is treated: neither weight decay nor trust ratio.
    """
    m, v = state
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    powers = [beta**num_steps if bias_correction else 0.0 for beta in betas]
    r = m / (1 - powers[0]) / (np.sqrt(v / (1 - powers[1])) + eps)
    u = r + weight_decay * weight if adapt else r
    of_weight, of_update = np.linalg.norm(weight), np.linalg.norm(u)
    trust = 1.0
    if adapt and of_weight > 0 and of_update > 0:
        trust = float(of_weight / of_update)
    return weight - lr * trust * u, [m, v]


#: optimiser -> its formula, and how many state arrays it has
PAPERS: dict[str, tuple[Callable[..., tuple[Array, list[Array]]], int]] = {
    "lars": (lars_by_the_paper, 1),
    "lamb": (lamb_by_the_paper, 2),
}


@dataclass(frozen=True)
class Setting:
    """Settings of an optimiser, in our keys and in the package's.

    `size` multiplies the weights; `falling`: the rate is halved at every update.
    """

    about: str
    optimiser: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    size: float = 1.0
    falling: bool = False


#: the package's keys are those closest to the paper: its adam_debias leaves the correction out
_PLAIN = {"bias_correction": False, "weight_decay": 0.0}
_DECAYED = {"bias_correction": False, "weight_decay": 0.1}
SETTINGS = (
    Setting("neither momentum nor decay", "lars", {"momentum": 0.0}, {"momentum": 0.0}),
    Setting("momentum 0.9", "lars", {"momentum": 0.9}, {"momentum": 0.9}),
    Setting("the same, a falling rate", "lars", {"momentum": 0.9}, {"momentum": 0.9}, falling=True),
    Setting("weight decay 0.1", "lars", {"momentum": 0.0, "weight_decay": 0.1}, {"momentum": 0.0, "weight_decay": 0.1}),
    Setting("neither bias correction nor decay", "lamb", _PLAIN, {"adam_debias": True}),
    Setting("the same, weights of norm above 10", "lamb", _PLAIN, {"adam_debias": True}, size=10.0),
    Setting("weight decay 0.1", "lamb", _DECAYED, {"adam_debias": True, "weight_decay": 0.1, "weight_decouple": False}),
    Setting("bias correction", "lamb", {"weight_decay": 0.0}, {}),
)


class Bag(nn.Module):
    """Parameters of the given shapes, with normal values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator, dtype=dtype) * 0.05 for shape in shapes]
        self.tensors = nn.ParameterList(nn.Parameter(value) for value in values)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters with 1000 classes, in the order of the model."""
    shapes: list[tuple[int, ...]] = []

    def convolution(num_in: int, num_out: int, kernel: int) -> int:
        shapes.extend([(num_out, num_in, kernel, kernel), (num_out,), (num_out,)])  # with its batch norm
        return num_out

    channels = convolution(3, 64, 7)
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            convolution(channels, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


#: takes a step with the given rate
Step = Callable[[float], None]


def our_step(model: nn.Module, name: str, keys: dict[str, Any]) -> Step:
    section = OptimSection.model_validate({"name": name, "lr": 1.0, **keys})
    optimiser = build_optimiser(section, model, by_dimension(model))
    divisor = torch.tensor(1.0)
    return lambda lr: step(optimiser, divisor, lr)


def their_step(model: nn.Module, name: str, keys: dict[str, Any]) -> Step:
    weights = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}] if others else [{"params": weights}]
    optimiser = getattr(importlib.import_module(PACKAGE), CLASSES[name])(groups, **keys)

    def take(lr: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.step()

    return take


CONTENDERS: tuple[Callable[[nn.Module, str, dict[str, Any]], Step], ...] = (our_step, their_step)


@dataclass
class Lane:
    """One optimiser of both sides on ResNet-50's parameters; milliseconds (wall, processor) by side and round."""

    name: str
    keys: dict[str, Any]
    took: tuple[list[tuple[float, float]], list[tuple[float, float]]] = field(default_factory=lambda: ([], []))

    def measure(self, num_rounds: int) -> None:
        models = [Bag(resnet50_shapes()) for _ in CONTENDERS]
        steps = [make(model, self.name, self.keys) for make, model in zip(CONTENDERS, models, strict=True)]
        values = [param.detach().clone() for param in models[0].parameters()]
        grads = [[torch.empty_like(value) for value in values] for _ in CONTENDERS]
        for model, own in zip(models, grads, strict=True):
            for param, grad in zip(model.parameters(), own, strict=True):
                param.grad = grad
        for number in range(-2, num_rounds):  # the first two warm up
            for side in (0, 1) if number % 2 else (1, 0):
                torch._foreach_copy_(grads[side], values)
                wall, processor = time.perf_counter(), time.process_time()
                steps[side](1e-3)
                took = ((time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3)
                if number >= 0:
                    self.took[side].append(took)

    def row(self) -> str:
        wall, processor = (
            [statistics.median(took[clock] for took in self.took[side]) for side in (0, 1)] for clock in (0, 1)
        )
        # neighbouring rounds see the same load on the machine, so ratios are taken between them
        ratios = sorted(theirs[1] / ours[1] for ours, theirs in zip(*self.took, strict=True))
        return (
            f"| {self.name} | {wall[0]:.0f}, {processor[0]:.0f} | {wall[1]:.0f}, {processor[1]:.0f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f}) |"
        )


def deviation(
    make: Callable[[nn.Module, str, dict[str, Any]], Step], setting: Setting, keys: dict[str, Any], num_updates: int
) -> float:
    """Return how far the weights are from the formula's after the updates, relative to how far that has moved them."""
    rng = np.random.default_rng(1)
    model = Bag([(16, 8, 3, 3), (40, 30)], torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(setting.size)
    formula, num_arrays = PAPERS[setting.optimiser]
    start = [param.detach().numpy().copy() for param in model.parameters()]
    weights = list(start)
    states = [[np.zeros_like(weight)] * num_arrays for weight in weights]
    update = make(model, setting.optimiser, keys)
    for number in range(1, num_updates + 1):
        lr = 0.1 / 2**number if setting.falling else 0.1
        for i, param in enumerate(model.parameters()):
            grad = rng.standard_normal(param.shape)
            weights[i], states[i] = formula(weights[i], grad, states[i], number, lr=lr, **setting.ours)
            param.grad = torch.from_numpy(grad)
        update(lr)
    return max(
        float(np.linalg.norm(param.detach().numpy() - weight) / np.linalg.norm(weight - before))
        for param, weight, before in zip(model.parameters(), weights, start, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()  # as in training, for both sides
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is missing: pip install -e '.[bench]'") from None
    load = os.getloadavg()[0]
    shapes = resnet50_shapes()
    num_values = sum(int(np.prod(shape)) for shape in shapes)
    lanes = [Lane("lars", {"momentum": 0.9, "weight_decay": 1e-4}), Lane("lamb", {"weight_decay": 0.01})]
    for lane in lanes:
        lane.measure(options.rounds)
        print(lane.row(), flush=True)
    agreement = []
    for setting in SETTINGS:
        cells = []
        for make, keys in zip(CONTENDERS, (setting.ours, setting.theirs), strict=True):
            apart = [deviation(make, setting, keys, num_updates) for num_updates in (1, 5)]
            cells.append(f"{apart[0]:.1e}, {apart[1]:.1e}: {'agrees' if max(apart) < CLOSE else 'differs'}")
        agreement.append(f"| {setting.optimiser} | {setting.about} | {' | '.join(cells)} |")
    text = "\n".join(
        [
            "# LARS and LAMB",
            "",
            f"{when_and_where(load)}; {PACKAGE} {version}, threads: {options.threads}. "
            f"Medians of {options.rounds} rounds in turns. "
            "Made by `python -m bench.optimisers`.",
            "",
            f"One step of {len(shapes)} tensors with {num_values:,} values, as ResNet-50 has; both with weight decay. "
            "Milliseconds on the wall, then of processor time, whose ratio is given.",
            "",
            f"| optimiser | Podium | {PACKAGE} | {PACKAGE} / Podium (least … most) |",
            "|---|---|---|---|",
            *(lane.row() for lane in lanes),
            "",
            "How far weights are from the papers' formulas after 1 and 5 updates, as part of how far those move them:",
            "",
            f"| optimiser | setting | Podium | {PACKAGE} |",
            "|---|---|---|---|",
            *agreement,
            "",
            f"In {PACKAGE} 4.1, LARS keeps the rate out of the momentum: a new rate also multiplies old gradients. "
            "Lamb takes norms of weights above 10 for 10, and corrects for bias after the trust ratio, which makes the "
            "first step ten times as long (beta 0.9); done before it, as in the paper, the ratio cancels most of it.",
            "",
        ]
    )
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
