"""A study of nine runs, one by one and side by side: wall time, and whether the tables are equal.

    python -m bench.studies              about seven minutes; prints a table and writes bench/results/studies.md

one by one           --at-once 1, one thread for each run
side by side         --at-once 2, one thread each: what `auto` chooses on two cores
one by one, wide     --at-once 1, two threads for each run: all cores, one run after another

The forms take turns, round by round, as the machine's speed varies. Times are of the whole command, from its start to
its table, so each run's start (importing torch, reading samples, a first pass) is in them. Side by side must give the
table of one by one to the bit; two threads add in another order, and have losses of their own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "studies.md"
STUDY = ["neuron/quick", "optim.lr=5e-4,1e-3,2e-3", "batch.replicas=1,2,4", "workload.data.samples=4000",
         "train.length=6ep", "log.report=false", "log.tensorboard=false"]  # fmt: skip
FORMS = {
    "one by one": ["--at-once", "1"],
    "side by side": ["--at-once", "2"],
    "one by one, wide": ["--at-once", "1", "engine.threads=2"],
}


def conduct(words: list[str], out: Path) -> tuple[float, bytes]:
    """Return the seconds of a study and its table."""
    command = [sys.executable, "-m", "podium", "study", *STUDY, *words, "--out", str(out)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began, (out / "table.csv").read_bytes()


def main() -> None:
    """Measure all forms in turn, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    tables: dict[str, set[bytes]] = {form: set() for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        conduct(["--runs", "1"], Path(folder) / "warm")  # simulates the cells, and compiles
        for count in range(rounds):
            for form, words in FORMS.items():
                took, table = conduct(words, Path(folder) / f"{form}-{count}")
                seconds[form].append(took)
                tables[form].add(table)
                print(f"{form}: {took:.1f} s", file=sys.stderr)
    equal = tables["one by one"] == tables["side by side"] and all(len(found) == 1 for found in tables.values())
    first = statistics.median(seconds["one by one"])
    lines = [
        "# Studies",
        "",
        f"{when_and_where(load)}. Made by `python -m bench.studies`: `podium study {' '.join(STUDY)}`.",
        "",
        f"Nine runs of the small neuron inverter; median of {rounds} rounds (least … most).",
        "",
        "| form | threads of a run | wall time, s | one by one / it |",
        "|---|---:|---:|---:|",
    ]
    for form, found in seconds.items():
        middle = statistics.median(found)
        lines.append(
            f"| {form} | {2 if 'wide' in form else 1} | {middle:.1f} ({min(found):.1f} … {max(found):.1f}) | "
            f"{first / middle:.2f} |"
        )
    lines += ["", f"Tables of one by one and side by side, all rounds: {'equal to the bit' if equal else 'DIFFERENT'}."]
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
