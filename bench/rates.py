"""Three rates for a recipe of every workload: input only, compute only, both together.

    python -m bench.rates            about five minutes; prints a table and writes bench/results/rates.md

As `podium profile RECIPE --rates` measures them, one process for each recipe.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench.where import when_and_where
from podium.profiling.rates import measured_rates
from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from podium.ui.console import number

RESULTS = Path(__file__).parent / "results" / "rates.md"
RECIPES = {
    "mnist": ["workload.data.source=generated"],
    "neuron/quick": [],
    "neuron/full": [],
    "cnn/quick": [],
    "bert/quick": [],
    "gpt2/quick": [],
    "cosmology/quick": [],
}


def row(name: str, seconds: float) -> str:
    training = build_training(load_recipe(name, RECIPES[name]))
    rates = measured_rates(training, seconds)
    told = [number(rate) for rate in (rates.input, rates.compute, rates.both)]
    shown = " ".join([name, *RECIPES[name]])
    return f"| {shown} | {' | '.join(told)} | {rates.both / min(rates.input, rates.compute):.0%} | {rates.bottleneck} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", choices=RECIPES, help=argparse.SUPPRESS)  # one recipe, in this process
    given = parser.parse_args()
    if given.only:
        print(row(given.only, given.seconds))
        return
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "bench.rates", "--seconds", str(given.seconds), "--only"]
    rows = []
    for name in RECIPES:
        done = subprocess.run([*command, name], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(done.stdout.strip().splitlines()[-1])
        print(rows[-1], flush=True)
    RESULTS.write_text(
        f"# Three rates\n\n{when_and_where(load)}. `python -m bench.rates`: samples/s, "
        f"medians of three stretches of {given.seconds:g} s, in turns.\n\n"
        "| recipe | input only | compute only | both | of the slower | bottleneck |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
