"""What each kernel gains: our own operators against plain torch and torch.compile, forward and backward, on the cases
of the table, on one thread and on all cores.

    python -m bench.kernels                 prints a table and writes bench/results/kernels.md; a quarter of an hour
    python -m bench.kernels --quick         to see that it works, not to measure
    python -m bench.kernels --threads 1 --kernels winograd      only prints
    python -m bench.kernels --threads 1 --processor         by processor time, on a busy machine; only prints

The three alternate; times are medians over the rounds, and a ratio is the median of the rounds' ratios. A kernel whose
ratios are not above 1 no longer pays off against the installed torch. Lines are those of its files that are not blank:
what it costs to keep.
"""

import argparse
import copy
import importlib.util
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


def passes(model: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that runs both passes, as training does."""
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    given = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]

    def run() -> None:
        output = model(*given)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        for tensor in (*given, *params):
            tensor.grad = None

    return run


def seconds(run: Callable[[], None], least: float, clock: Callable[[], float]) -> float:
    """Return the seconds of one call, averaged over as many calls as take `least` seconds."""
    count, began = 0, clock()
    while count == 0 or clock() - began < least:
        run()
        count += 1
    return (clock() - began) / count


def num_lines(kernel: str) -> int:
    """Return the lines of a kernel's own files that are not blank."""
    found = (importlib.util.find_spec(name) for name in registry.KERNELS[kernel].files)
    paths = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    return sum(bool(line.strip()) for path in paths for line in path.read_text(encoding="utf-8").splitlines())


def compiled_passes(case: Case) -> Callable[[], None] | None:
    """Return both passes of the plain form, compiled; None where torch.compile cannot."""
    torch.manual_seed(0)
    registry.use("off")
    torch.compiler.reset()
    run = passes(torch.compile(case.build()), case.inputs())
    try:
        run()
    except Exception as error:
        print(f"{case.kernel}, {case.name}: not compiled: {type(error).__name__}")
        return None
    return run


def _with_products(kernel: str) -> registry.Choice:
    """Return the kernel, and that of products where it pays: others leave theirs to it."""
    registry.use("auto")
    return sorted({kernel, *(registry.chosen() & {"products"})})


def measured(case: Case, rounds: int, least: float, clock: Callable[[], float]) -> list[list[float]]:
    """Return the seconds of plain torch, of ours and, where it can be compiled, of torch.compile, round by round."""
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    fast = copy.deepcopy(model)
    own = _with_products(case.kernel)
    registry.use(own)
    apply_layout(fast, "channels_last")
    sides: list[tuple[registry.Choice, Callable[[], None]]] = [
        ("off", passes(model, inputs)),
        (own, passes(fast, tuple(tensor.detach().clone() for tensor in inputs))),
    ]
    if (compiled := compiled_passes(case)) is not None:
        sides.append(("off", compiled))
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, (choice, run) in enumerate(sides):
            registry.use(choice)
            took = seconds(run, least, clock)
            if number:  # the first round compiles machine code and fills caches
                found[side].append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--kernels", nargs="+", choices=registry.KERNELS, default=list(registry.KERNELS))
    parser.add_argument("--processor", action="store_true", help="processor time; with several threads it counts waits")
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    keep_memory()
    rounds, least = (1, 0.0) if options.quick else (7, 0.2)
    lines = [
        "# Kernels against plain torch and torch.compile",
        "",
        f"{when_and_where(os.getloadavg()[0])}. Forward and backward, medians of {rounds} rounds. "
        "Made by `python -m bench.kernels`.",
        "",
        "| kernel | lines | on | threads | ours ms | torch ms | torch / ours (least … most) | compiled / ours |",
        "|---|---:|---|---:|---:|---:|---|---|",
    ]
    print("\n".join(lines))
    whole = options.kernels == list(registry.KERNELS) and len(options.threads) > 1
    for case in all_cases():
        if not case.real or case.kernel not in options.kernels:
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            theirs, ours, *compiled = measured(case, rounds, least, clock)
            times = " | ".join(f"{statistics.median(values) * 1e3:,.2f}" for values in (ours, theirs))
            against = [_ratio(values, ours) for values in (theirs, *compiled)] + [""] * (1 - len(compiled))
            lines.append(
                f"| {case.kernel} | {num_lines(case.kernel)} | {case.name} | {threads} | {times} | "
                f"{' | '.join(against)} |"
            )
            print(lines[-1], flush=True)
    if whole and not (options.quick or options.processor):
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _ratio(theirs: list[float], ours: list[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


if __name__ == "__main__":
    main()
