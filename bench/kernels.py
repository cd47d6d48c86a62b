"""What each kernel gains: our own operators against plain torch, forward and backward, on the cases of the table.

    python -m bench.kernels                 prints a table and writes bench/results/kernels.md; a minute or two
    python -m bench.kernels --quick         to see that it works, not to measure
    python -m bench.kernels --threads 1     only prints

Plain torch and ours alternate; times are medians over the rounds, and the ratio is the median of the rounds' ratios. A
kernel whose ratio is not above 1 no longer pays off against the installed torch.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.where import when_and_where
from podium.kernels import registry
from podium.kernels.cases import Case, all_cases
from podium.kernels.install import apply_layout
from podium.machine.allocator import keep_memory

RESULTS = Path(__file__).parent / "results" / "kernels.md"


def passes(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that runs both passes, as training does."""
    given = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]

    def run() -> None:
        output = model(*given)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        for tensor in (*given, *model.parameters()):
            tensor.grad = None

    return run


def seconds(run: Callable[[], None], least: float) -> float:
    """Return the seconds of one call, averaged over as many calls as take `least` seconds."""
    count, began = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - began < least:
        run()
        count += 1
    return (time.perf_counter() - began) / count


def measured(case: Case, rounds: int, least: float) -> tuple[list[float], list[float]]:
    """Return the seconds of plain torch and of ours, round by round."""
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    fast = copy.deepcopy(model)
    registry.use([case.kernel])
    apply_layout(fast, "channels_last")
    sides: list[tuple[registry.Choice, Callable[[], None]]] = [
        ("off", passes(model, inputs)),
        ([case.kernel], passes(fast, tuple(tensor.detach().clone() for tensor in inputs))),
    ]
    found: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for side, (choice, run) in enumerate(sides):
            registry.use(choice)
            took = seconds(run, least)
            if number:  # the first round compiles machine code and fills caches
                found[side].append(took)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    rounds, least = (1, 0.0) if options.quick else (7, 0.2)
    lines = [
        "# Kernels against plain torch",
        "",
        f"{when_and_where(os.getloadavg()[0])}. Forward and backward, medians of {rounds} rounds. "
        "Made by `python -m bench.kernels`.",
        "",
        "| kernel | on | torch ms | ours ms | torch / ours (least … most) | threads |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for case in all_cases():
        if not case.real:
            continue
        theirs, ours = measured(case, rounds, least)
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        times = " | ".join(f"{statistics.median(values) * 1e3:,.2f}" for values in (theirs, ours))
        lines.append(f"| {case.kernel} | {case.name} | {times} | {spread} | {options.threads} |")
        print(lines[-1], flush=True)
    if not options.quick and options.threads == os.cpu_count():
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
