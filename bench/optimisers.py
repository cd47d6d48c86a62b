"""LARS and LAMB against those of the package pytorch_optimizer: what a step costs, and whether it is the papers'.

    python -m bench.optimisers           a minute; prints tables and writes bench/results/optimisers.md

A step is that of ResNet-50's parameters, 161 tensors with 25.6 million values, in float32; the two take turns, and
which goes first changes from round to round. Gradients are filled in anew before every step, outside of what is timed.

The papers' formulas stand below, written out in numpy: the tests hold our optimisers to them, the second table both
sides. Deviations are those of the weights in float64, as part of how far the formula has moved them.
"""

import argparse
import datetime
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

from podium.optim.optimisers import OptimSection, build_optimiser, step
from podium.workloads.base import by_dimension

RESULTS = Path(__file__).parent / "results" / "optimisers.md"
PACKAGE = "pytorch_optimizer"
CLASSES = {"lars": "LARS", "lamb": "Lamb"}
#: what counts as the same formula
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
    """(weight, state) after a step by You, Gitman, Ginsburg 2017; `state` is (v,), zero before the first step.

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
    """(weight, state) after a step by You et al. 2020, `num_steps` counted from 1; `state` is (m, v), zero at first.

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


#: optimiser -> its formula, and how many arrays it remembers
PAPERS: dict[str, tuple[Callable[..., tuple[Array, list[Array]]], int]] = {
    "lars": (lars_by_the_paper, 1),
    "lamb": (lamb_by_the_paper, 2),
}


@dataclass(frozen=True)
class Setting:
    """What an optimiser is asked to do, in our keys and in the package's; `size` multiplies the weights."""

    about: str
    optimiser: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    size: float = 1.0


SETTINGS = (
    Setting("neither momentum nor decay", "lars", {"momentum": 0.0}, {"momentum": 0.0}),
    Setting("momentum 0.9", "lars", {}, {"momentum": 0.9}),
    Setting("weight decay 0.1", "lars", {"momentum": 0.0, "weight_decay": 0.1}, {"momentum": 0.0, "weight_decay": 0.1}),
    Setting("no bias correction, no decay", "lamb", {"bias_correction": False, "weight_decay": 0.0}, {}),
    Setting("the same, norms above 10", "lamb", {"bias_correction": False, "weight_decay": 0.0}, {}, size=10.0),
    Setting("weight decay 0.1", "lamb", {"bias_correction": False, "weight_decay": 0.1}, {"weight_decay": 0.1}),
    Setting("bias correction", "lamb", {"weight_decay": 0.0}, {"adam_debias": True}),
)


class Bag(nn.Module):
    """Parameters of the given shapes, with normal values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator, dtype=dtype) * 0.05 for shape in shapes]
        self.tensors = nn.ParameterList(nn.Parameter(value) for value in values)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Of ResNet-50 with 1000 classes, in the order of the model."""
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


def our_step(model: nn.Module, name: str, keys: dict[str, Any], lr: float) -> Callable[[], None]:
    optimiser = build_optimiser(OptimSection(name=name, lr=lr, **keys), model, by_dimension(model))
    divisor = torch.tensor(1.0)
    return lambda: step(optimiser, divisor)


def their_step(model: nn.Module, name: str, keys: dict[str, Any], lr: float) -> Callable[[], None]:
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]
    made = getattr(importlib.import_module(PACKAGE), CLASSES[name])([g for g in groups if g["params"]], lr=lr, **keys)
    return lambda: made.step()


CONTENDERS: tuple[Callable[[nn.Module, str, dict[str, Any], float], Callable[[], None]], ...] = (our_step, their_step)


@dataclass
class Lane:
    """An optimiser of both sides at ResNet-50's parameters, and the milliseconds of its steps by round."""

    name: str
    keys: dict[str, Any]
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def measure(self, num_rounds: int) -> None:
        models = [Bag(resnet50_shapes()) for _ in CONTENDERS]
        steps = [make(model, self.name, self.keys, 1e-3) for make, model in zip(CONTENDERS, models, strict=True)]
        grads = [param.detach().clone() for param in models[0].parameters()]
        for model in models:
            for param in model.parameters():
                param.grad = torch.empty_like(param)
        for number in range(-2, num_rounds):  # the first two warm up
            for side in (0, 1) if number % 2 else (1, 0):
                torch._foreach_copy_([param.grad for param in models[side].parameters()], grads)
                began = time.perf_counter()
                steps[side]()
                took = (time.perf_counter() - began) * 1e3
                if number >= 0:
                    (self.ours, self.theirs)[side].append(took)

    def row(self) -> str:
        # neighbouring rounds share what the machine was doing, so ratios are taken between these
        ratios = sorted(b / a for a, b in zip(self.ours, self.theirs, strict=True))
        return (
            f"| {self.name} | {statistics.median(self.ours):.1f} | {statistics.median(self.theirs):.1f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f}) |"
        )


def deviation(
    make: Callable[[nn.Module, str, dict[str, Any], float], Callable[[], None]],
    setting: Setting,
    keys: dict[str, Any],
    num_updates: int,
) -> float:
    """How far the weights are from the formula's after so many updates, as part of how far that has moved them."""
    lr, rng = 0.1, np.random.default_rng(1)
    model = Bag([(16, 8, 3, 3), (40, 30)], torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param *= setting.size
    formula, num_arrays = PAPERS[setting.optimiser]
    start = [param.detach().numpy().copy() for param in model.parameters()]
    weights = list(start)
    states = [[np.zeros_like(weight)] * num_arrays for weight in weights]
    update = make(model, setting.optimiser, keys, lr)
    for number in range(1, num_updates + 1):
        for i, param in enumerate(model.parameters()):
            grad = rng.standard_normal(param.shape)
            weights[i], states[i] = formula(weights[i], grad, states[i], number, lr=lr, **setting.ours)
            param.grad = torch.from_numpy(grad)
        update()
    return max(
        float(np.linalg.norm(param.detach().numpy() - weight) / np.linalg.norm(weight - before))
        for param, weight, before in zip(model.parameters(), weights, start, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
            f"{datetime.datetime.now():%Y-%m-%d %H:%M}; {os.cpu_count()} cores, "
            f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, {PACKAGE} {version}, "
            f"{options.threads} threads, load {load:.2f} at the start. Medians of {options.rounds} rounds in turns. "
            "Made by `python -m bench.optimisers`.",
            "",
            f"One step of {len(shapes)} tensors with {num_values:,} values, as ResNet-50 has; both with weight decay.",
            "",
            f"| optimiser | Podium ms | {PACKAGE} ms | times faster (least … most) |",
            "|---|---|---|---|",
            *(lane.row() for lane in lanes),
            "",
            "How far weights are from the papers' formulas after 1 and 5 updates, as part of how far those move them:",
            "",
            f"| optimiser | setting | Podium | {PACKAGE} |",
            "|---|---|---|---|",
            *agreement,
            "",
        ]
    )
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
