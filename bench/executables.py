"""Seconds until a compiled model is ready: compiled for the first time, loaded by a later run, and with two instances.

    python -m bench.executables [--quick]

Runs `podium train` with `engine.compile=true` for a few updates, with a cache of its own, and reads the summaries and
the logs of the instances. Prints a table and writes bench/results/executables.md.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results" / "executables.md"
LANES = {
    "gpt2/quick": ["gpt2/quick", "workload.data.source=generated", "workload.data.samples=256", "batch.replicas=2",
                   "workload.data.vocabulary=4096", "workload.model.vocabulary=4096", "valid.max_samples=16"],
    "cnn/quick": ["cnn/quick", "workload.data.source=generated", "workload.data.samples=512", "batch.replicas=2",
                  "workload.data.test_samples=64", "schedule.warmup=0"],
}  # fmt: skip
SHORT = ["train.length=3up", "engine.threads=1", "engine.compile=true", "log.tensorboard=false", "log.report=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="cnn alone; writes nothing")
    options = parser.parse_args()
    lines = ["| recipe | instances | cache | instance 0 | others | whole run, s |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name, recipe in LANES.items():
        if options.quick and name != "cnn/quick":
            continue
        for count in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                for cache in ("empty", "filled"):
                    lines.append(f"| {name} | {count} | {cache} | {_run(recipe, count, Path(folder), cache)} |")
                    print(lines[-1], flush=True)
    if not options.quick:
        _write(lines)


def _run(recipe: list[str], count: int, folder: Path, name: str) -> str:
    out = folder / name
    command = [sys.executable, "-m", "podium", "train", *recipe, *SHORT, "--instances", str(count), "--out", str(out)]
    env = {**os.environ, "PODIUM_CACHE": str(folder / "cache")}
    subprocess.run(command, env=env, check=True, capture_output=True)
    summary = json.loads((out / "summary.json").read_text())
    logs = [(out / "log" / f"instance-{index}.log").read_text() for index in range(1, count)]
    others = [match[0] for log in logs if (match := re.search(r"(compiled|loaded) in [\d.]+ s", log))]
    made = summary["executable"]
    total = summary["seconds"]["total"]
    return f"{made['state']} in {made['seconds']:.1f} s | {', '.join(others) or '–'} | {total:.1f}"


def _write(lines: list[str]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    about = (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, two "
        "replicas of one thread each, three updates. The seconds of the others hold their wait for instance 0. "
        "Written by `python -m bench.executables`."
    )
    RESULTS.write_text("\n".join(["# Compiled models", "", about, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
