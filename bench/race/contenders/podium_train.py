"""Podium as installed: `podium train` with its feed, metric records, TensorBoard and digests of the weights.

Timed by its own records, by the wall clock: everything between the record that ends the warm-up and the last one
counts, including writing the records. As the others save nothing, the only checkpoint is that after the last update.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.race.heat import Heat, Outcome
from bench.race.lane import build_model, build_workload
from podium.checkpoints import reading
from podium.runs.folder import Run


def race(heat: Heat, more: Sequence[str] = (), options: Sequence[str] = ()) -> Outcome:
    run = Run(Path(heat.folder) / "run")
    overrides = [
        *heat.overrides,
        *more,
        f"train.length={heat.total_updates}up",
        "checkpoint.every=0",
        # The others neither validate nor draw figures: here that happens only after the last update.
        "valid.every=0",
        "valid.max_samples=8",
        "log.report=false",
    ]
    if heat.compare:  # a record where the warm-up ends, and one before it: the first is slow to write
        overrides.append(f"engine.updates_per_call={heat.num_warmup // 2}")
    command = [sys.executable, "-m", "podium", "train", heat.lane.recipe, *overrides, "--out", str(run.path), *options]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stderr)
    assert run.recipe().log.tensorboard, "as installed"
    threads = run.environment()["busy_threads"]
    if heat.end_to_end:
        return Outcome(took, None, threads, took)
    at = {record["update"]: record["time/total_s"] for record in run.records()}
    seconds = at[heat.total_updates] - at[heat.num_warmup]
    if not heat.compare:
        return Outcome(seconds, None, threads, took)
    model = build_model(heat.recipe(), build_workload(heat.recipe()))
    saved = reading.load_latest(run.checkpoints, sys.exit)
    assert saved is not None
    assert saved.update == heat.total_updates
    saved.restore(model)
    return Outcome(seconds, model, threads, took)
