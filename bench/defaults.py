"""What each default is worth: training as installed against training without one of its choices.

    python -m bench.defaults            some minutes; prints a table and writes bench/results/defaults.md
    python -m bench.defaults --quick    to see that it works, not to measure

Every measurement runs in a process of its own, with the engine and the feed on generated samples, all cores, one
replica; measurements with and without a choice alternate, and ratios are taken within each round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from bench.where import when_and_where
from podium.kernels.registry import KERNELS
from podium.recipe.loading import load_recipe
from podium.topology import usable_cores
from podium.training.build import build_training
from podium.tune.measure import measured_updates

RESULTS = Path(__file__).parent / "results" / "defaults.md"
CASES = {
    "mnist, micro-batch 8": ("mnist", "batch.micro=8"),
    "mnist, micro-batch 64": ("mnist", "batch.micro=64"),
    "neuron/full, micro-batch 192": ("neuron/full", "workload.data.samples=1920"),
    "ResNet-20, micro-batch 128": ("cnn/quick", "workload.model.size=20", "batch.micro=128"),
}
PLAIN = ("workload.data.source=generated", "schedule.warmup=0", "engine.tune=off")
AS_INSTALLED = "as installed"
FUSED = ("conv_pool", "batch_norm")
WITHOUT_FUSED = f"engine.kernels=[{','.join(name for name in KERNELS if name not in FUSED)}]"


def _keep_glibc() -> None:
    import podium.training.build as module

    module.keep_memory = lambda: False  # type: ignore[assignment]


def _use_workers_elsewhere() -> None:
    """Start a thread that uses all cores once and then sleeps, which `podium.machine.threads` otherwise prevents."""
    used = threading.Event()

    def use() -> None:
        torch.set_num_threads(torch.get_num_threads())
        torch.rand(1 << 22).exp_()
        used.set()
        threading.Event().wait()

    threading.Thread(target=use, daemon=True).start()
    used.wait()


#: what is left out -> (overrides of the recipe, what is first done to the process)
WITHOUT: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    AS_INSTALLED: ((), lambda: None),
    "channels-last convolutions (engine.layout)": (("engine.layout=default",), lambda: None),
    "memory kept by the process": ((), _keep_glibc),
    "modules as one operator (convolution and pool, batch norm and ReLU)": (
        (WITHOUT_FUSED,),
        lambda: None,
    ),
    "threads beside the training that start no workers": ((), _use_workers_elsewhere),
    "no more threads than a micro-batch is worth": ((f"engine.threads={len(usable_cores())}",), lambda: None),
    "samples ahead of time (engine.prefetch)": (("engine.prefetch=0",), lambda: None),
}


def rate(case: str, without: str, seconds: float) -> float:
    """Return the samples per second, measured in a fresh process."""
    command = [sys.executable, "-m", "bench.defaults", "--measure", case, without, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def measure(case: str, without: str, seconds: float) -> None:
    overrides, first = WITHOUT[without]
    first()
    name, *given = CASES[case]
    print(measured_updates(build_training(load_recipe(name, [*PLAIN, *given, *overrides])), seconds)["rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("CASE", "WITHOUT", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], options.measure[1], float(options.measure[2]))
        return
    num_rounds, seconds = (1, 0.3) if options.quick else (3, 2.0)
    load = os.getloadavg()[0]
    lines = [
        "# What the defaults are worth",
        "",
        f"{when_and_where(load)}. "
        f"Medians of {num_rounds} rounds of {seconds:g} s (least … most). Made by `python -m bench.defaults`.",
        "",
        "| training | without | samples/s | as installed / without |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        rates: dict[str, list[float]] = {without: [] for without in WITHOUT}
        for number in range(num_rounds):
            order = list(WITHOUT) if number % 2 == 0 else list(WITHOUT)[::-1]
            for without in order:
                rates[without].append(rate(case, without, seconds))
        for without, found in rates.items():
            ratios = [whole / part for whole, part in zip(rates[AS_INSTALLED], found, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
            shown = "–" if without == AS_INSTALLED else without
            lines.append(f"| {case} | {shown} | {statistics.median(found):,.0f} | {'' if shown == '–' else spread} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if not options.quick:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
