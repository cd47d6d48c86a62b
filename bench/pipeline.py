"""A pipeline of two stages against two replicas, and the memory of every instance.

    python -m bench.pipeline            about eight minutes; prints tables and writes bench/results/pipeline.md

Every row is `podium train …` in processes of its own, with one thread each and the same global batch; rows alternate
over the rounds. The rate is that of the run's own records except the first. Memory is the peak of what a process shares
with no other (USS) while it trains; the memory of a Podium process before it has a model is shown separately.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

RESULTS = Path(__file__).parent / "results" / "pipeline.md"
MODEL = ["gpt2/quick", "workload.data.source=generated", "workload.data.samples=4096", "workload.data.test_samples=40",
         "workload.model.layers=6", "workload.model.hidden=256", "workload.model.heads=8", "workload.model.context=128",
         "workload.model.vocabulary=8192", "engine.threads=1", "batch.micro=4", "train.length=8up",
         "engine.updates_per_call=1", "valid.every=0", "valid.max_samples=4", "checkpoint.every=0", "log.report=false",
         "log.tensorboard=false", "schedule.warmup=0", "engine.tune=off"]  # fmt: skip
ACCUMULATION = 16
#: a row's name, its overrides, its instances
ROWS: list[tuple[str, list[str], int]] = [
    ("1 instance, the whole model", [f"batch.accumulation={ACCUMULATION}"], 1),
    ("2 replicas on 2 instances", [f"batch.accumulation={ACCUMULATION // 2}", "batch.replicas=2"], 2),
    *(
        (
            f"2 stages, {schedule}",
            [f"batch.accumulation={ACCUMULATION}", "parallel.stages=2", f"parallel.schedule={schedule}"],
            2,
        )
        for schedule in ("interleaved", "grouped", "sequential")
    ),
]


def run(overrides: Sequence[str], num_instances: int, out: Path) -> tuple[float, list[float], str]:
    """Return (samples per second, MB of each instance, sha256 of the weights)."""
    command = [sys.executable, "-m", "podium", "train", *MODEL, *overrides, "--out", str(out)]
    process = subprocess.Popen([*command, "--instances", str(num_instances)], stderr=subprocess.DEVNULL)
    most: dict[int, float] = {}
    watch = threading.Thread(target=_watch, args=(process, most, num_instances), daemon=True)
    watch.start()
    assert process.wait() == 0
    watch.join()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [record["train/samples_per_second"] for record in records[1:]]
    weights = json.loads((out / "summary.json").read_text())["weights_sha256"]
    return statistics.median(rates), sorted(most.values(), reverse=True)[:num_instances], weights


def _watch(process: subprocess.Popen, most: dict[int, float], num_instances: int) -> None:
    while process.poll() is None:
        with suppress(psutil.Error):
            own = psutil.Process(process.pid)
            for one in own.children() if num_instances > 1 else [own]:
                most[one.pid] = max(most.get(one.pid, 0.0), one.memory_full_info().uss / 1e6)
        time.sleep(0.1)


def bare_process() -> float:
    """Return the MB of a process that has loaded only Podium and torch's distributed parts."""
    code = "import podium.train, psutil; print(psutil.Process().memory_full_info().uss / 1e6)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name, *_ in ROWS}
    memory: dict[str, list[float]] = {}
    weights: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="podium-pipeline-") as folder:
        for number in range(options.rounds):
            for name, overrides, num_instances in ROWS:
                rate, megabytes, digest = run(overrides, num_instances, Path(folder) / f"{time.monotonic_ns()}")
                rates[name].append(rate)
                memory[name] = [max(pair) for pair in zip(megabytes, memory.get(name, megabytes), strict=True)]
                weights[name] = digest
                shown = ", ".join(f"{one:.0f} MB" for one in megabytes)
                print(f"round {number + 1}: {name}: {rate:.2f} samples/s, {shown}", flush=True)
    text = page(rates, memory, weights, bare_process())
    print(text)
    if options.rounds >= 5:
        RESULTS.write_text(text, encoding="utf-8")


def page(
    rates: dict[str, list[float]], memory: dict[str, list[float]], weights: dict[str, str], bare_megabytes: float
) -> str:
    whole, replicas = (rates[name] for name, *_ in ROWS[:2])
    lines = [
        "# A pipeline of two stages", "",
        f"{datetime.date.today()}, torch {torch.__version__}, GPT-2 of 6 layers × 256, micro-batch 4 × 128 tokens, "
        f"{4 * ACCUMULATION} samples an update, one thread per instance, {len(whole)} rounds in turns; medians, ratios "
        "by round.", "",
        "| | samples/s | against 1 instance | against 2 replicas | MB of each instance | weights |",
        "|---|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for name, *_ in ROWS:
        ratios = [
            statistics.median(ours / theirs for ours, theirs in zip(rates[name], others, strict=True))
            for others in (whole, replicas)
        ]
        shown = " + ".join(f"{one:.0f}" for one in memory[name])
        lines.append(
            f"| {name} | {statistics.median(rates[name]):.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {shown} "
            f"| `{weights[name][:12]}` |"
        )
    lines += ["", f"A process with torch and Podium loaded, and nothing else, has {bare_megabytes:.0f} MB to itself."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
