"""Makes every page of bench/results anew, and the measured line of every recipe, one after the other: `make figures`.

    python -m bench.figures              all of them; many hours, on an idle machine
    python -m bench.figures --list       what would run, in its order
    python -m bench.figures --only start growth

The race comes first, as it is the most sensitive to whatever else the machine does. A script that fails is told at the
end, with what it printed in `bench/results/.log/`, and does not keep the others from running.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = Path(__file__).parent / "results" / ".log"
#: page -> the module that writes it, and its arguments
FIGURES: dict[str, tuple[str, ...]] = {
    "race": ("bench.race",),
    "race_end_to_end": ("bench.race.end_to_end",),
    "start": ("bench.start",),
    "kernels": ("bench.kernels",),
    "recipes": ("bench.recipes", "--write"),
    "instances": ("bench.instances",),
    "any_number": ("bench.instances", "--quick"),
    "lost": ("bench.lost",),
    "soak": ("bench.soak",),
    "overhead": ("bench.overhead",),
    "growth": ("bench.growth",),
    "defaults": ("bench.defaults",),
    "rates": ("bench.rates",),
    "input": ("bench.input",),
    "reduction": ("bench.reduction",),
    "blocks": ("bench.blocks",),
    "pipeline": ("bench.pipeline",),
    "sharding": ("bench.sharding",),
    "executables": ("bench.executables",),
    "optimisers": ("bench.optimisers",),
    "monitoring": ("bench.monitoring",),
    "reports": ("bench.reports",),
    "studies": ("bench.studies",),
    "plan": ("bench.plan",),
    "own_models": ("bench.own_models",),
    "large_batch": ("bench.large_batch",),
    "trust": ("bench.trust",),
    "batch_norm": ("bench.batch_norm",),
    "batch_norm_paired": ("bench.batch_norm", "--paired"),
}


def main() -> None:
    """Run all scripts, or some, and tell which failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="PAGE")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for name in options.only:
            print(f"{name}: python -m {' '.join(FIGURES[name])}")
        return
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        log, began = LOGS / f"{name}.txt", time.monotonic()
        print(f"{name}: begins, load {os.getloadavg()[0]:.2f}", flush=True)
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", *FIGURES[name]]
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
        minutes = (time.monotonic() - began) / 60
        print(f"{name}: {f'failed, see {log}' if done.returncode else 'done'} after {minutes:.0f} minutes", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
