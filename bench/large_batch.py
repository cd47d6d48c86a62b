"""Learning-rate scaling on a small scale: cosmology/quick at 1, 4 and 8 times the global batch, with each rule.

    python -m bench.large_batch            about five minutes; prints a table and writes bench/results/large_batch.md
    python -m bench.large_batch --quick    to see that it works, not to measure

All trainings see the same crops for the same number of epochs, so 8 times the batch has an eighth of the updates. The
rate is the recipe's times 1, the square root of the ratio, or the ratio; scaled rates warm up linearly over the same
share of the training as the recipe's. One training each: differences of a percent or two are noise.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.where import when_and_where
from podium.recipe.loading import Recipe, load_recipe
from podium.train import train

RESULTS = Path(__file__).parent / "results" / "large_batch.md"
RECIPE = "cosmology/quick"
#: ratio 1 needs no rule
FACTORS, SCALES = (1, 4, 8), ("none", "sqrt", "linear")
_SAMPLES, _EPOCHS = 512, 6
_BASE_BATCH = 8


@dataclass(frozen=True)
class Trained:
    """One cell of the table."""

    factor: int
    scale: str
    updates: int
    peak_lr: float
    valid_loss: float
    seconds: float


def recipe_of(factor: int, scale: str, samples: int, epochs: int) -> Recipe:
    """Build a recipe that accumulates to the global batch, so that the arithmetic of a sample is always the same."""
    return load_recipe(
        RECIPE,
        [
            f"workload.data.samples={samples}",
            f"batch.micro={_BASE_BATCH}",
            f"batch.accumulation={factor}",
            f"optim.scale={scale}",
            f"optim.base_batch={_BASE_BATCH}",
            f"train.length={epochs}ep",
            "valid.every=0",
            "checkpoint.every=0",
            "checkpoint.best=false",
            "engine.updates_per_call=1",
            "log.tensorboard=false",
            "log.report=false",
        ],
    )


def trained(factor: int, scale: str, samples: int, epochs: int) -> Trained:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="podium-large-batch-") as folder:
        run = train(recipe_of(factor, scale, samples, epochs), Path(folder) / "run")
        summary, rates = run.summary(), [record["train/lr"] for record in run.records()]
    return Trained(
        factor, scale, summary["updates"], max(rates), summary["valid"]["last"]["loss"], time.perf_counter() - began
    )


def table(cells: list[Trained]) -> str:
    """Format the table: batches in rows, rules in columns, the best rule of every batch in bold."""
    lines = [
        f"| global batch | updates | {' | '.join(SCALES)} |",
        f"|---|---{'|---' * len(SCALES)}|",
    ]
    for factor in FACTORS:
        row = [cell for cell in cells if cell.factor == factor]
        best = min(cell.valid_loss for cell in row)
        shown = {
            cell.scale: f"{'**' if cell.valid_loss == best else ''}{cell.valid_loss:.3e}"
            f"{'**' if cell.valid_loss == best else ''} ({cell.peak_lr:.1e})"
            for cell in row
        }
        told = " | ".join(shown.get(scale, "as none") for scale in SCALES)
        lines.append(f"| {factor * _BASE_BATCH} (× {factor}) | {row[0].updates} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few crops and one epoch; writes nothing")
    quick = parser.parse_args().quick
    samples, epochs = (64, 1) if quick else (_SAMPLES, _EPOCHS)
    load = os.getloadavg()[0]
    cells = []
    for factor in FACTORS:
        for scale in SCALES if factor > 1 else ("none",):
            cells.append(trained(factor, scale, samples, epochs))
            print(cells[-1], flush=True)
    text = (
        f"# Learning-rate scaling in small\n\n{when_and_where(load)}. `python -m bench.large_batch`: {RECIPE} with "
        f"{samples:,} crops an epoch, {epochs} epochs at every batch; {sum(cell.seconds for cell in cells):.0f} s in "
        "all. Validation loss after the last update, with the peak learning rate in parentheses.\n\n" + table(cells)
    )
    print(f"\n{text}")
    if not quick:
        RESULTS.write_text(text)
        print("written to", RESULTS)


if __name__ == "__main__":
    main()
