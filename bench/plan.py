"""Plans against what was measured: published tables, trainings on 1, 2 and 4 instances here, and memory.

    python -m bench.plan                       about ten minutes; prints tables and writes bench/results/plan.md
    python -m bench.plan --only tables         tables of others alone: seconds, and the same on every machine

tables     every table in bench/data/scaling is cut at 8, 16, 32 and 64 devices, and the rows left out are predicted
trainings  short trainings are measured on 1 and 2 instances, and 2 on half of the cores; then 1, 2 and 4 train in
           turns, and the plan grades itself. Trainings are long enough for what they cost once to be little
memory     the estimate behind plans and `engine.memory_check` against the peak of the training, at two micro-batches
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.where import when_and_where
from podium.plan.memory import PROGRAM
from podium.plan.scaling import predict
from podium.plan.tables import read_table

RESULTS = Path(__file__).parent / "results" / "plan.md"
TABLES = Path(__file__).parent / "data" / "scaling"
CUTS = (8, 16, 32, 64)
PLAIN = ["workload.data.source=generated", "schedule.warmup=0", "log.tensorboard=false"]
TRAININGS = {
    "mnist": ["batch.replicas=4", "train.length=1000up"],
    "neuron": ["batch.replicas=4", "batch.micro=32", "workload.data.samples=20000", "train.length=1200up"],
    "cnn/quick": ["batch.replicas=4", "workload.data.samples=8192", "train.length=120up"],
}
MEMORY = {
    "mnist": ("mnist", (64, 1024), []),
    "neuron": ("neuron", (64, 512), ["workload.data.samples=4096"]),
    "cnn": ("cnn/quick", (32, 128), ["workload.data.samples=2048"]),
    "cosmology": ("cosmology/quick", (1, 4), ["workload.data.samples=32", "workload.data.valid_samples=8"]),
    "gpt2": ("gpt2/quick", (8, 32), ["workload.data.samples=2048", "workload.model.vocabulary=4096"]),
    "gpt2, 50,257 tokens": ("gpt2/quick", (8, 16), ["workload.data.samples=2048", "valid.max_samples=128"]),
    "bert": ("bert/quick", (8, 32), ["workload.data.samples=2048"]),
}
COUNTS = (1, 2, 4)
#: no measurement may take the memory of the whole machine
MOST_BYTES = 16 << 30


def tables() -> list[str]:
    """Return the errors of predictions of rows that were left out."""
    lines = [
        "| table | known up to | devices | predicted / measured | nine of ten | inside |",
        "|---|---|---|---|---|---|",
    ]
    errors, inside = [], []
    for path in sorted(TABLES.glob("*.csv")):
        whole = read_table(path)
        for most in CUTS:
            known = whole.up_to(most)
            rows = [(n, s) for n, s in zip(whole.devices, whole.seconds, strict=True) if n > most]
            if len(known.devices) < 3 or known.devices[-1] != most or not rows:
                continue
            for (count, seconds), found in zip(rows, predict(known, [n for n, _ in rows]), strict=True):
                errors.append(abs(found.value / seconds - 1))
                inside.append(seconds in found)
                lines.append(
                    f"| {path.stem} | {most} | {count:,} | {found.value / seconds:.2f} | {found.low / seconds:.2f} … "
                    f"{found.high / seconds:.2f} | {'yes' if inside[-1] else 'no'} |"
                )
    return [
        f"{sum(inside)} of {len(inside)} inside their intervals of nine in ten; median error "
        f"{100 * statistics.median(errors):.0f} %, mean {100 * statistics.fmean(errors):.0f} %.",
        "",
        *lines,
    ]


def podium(*args: object, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "podium", *map(str, args)], capture_output=True, text=True, env={**os.environ, **env},
        preexec_fn=_limited,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"podium {args}: {done.stderr[-1000:]}")


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def trainings(rounds: int, recipes: Sequence[str]) -> list[str]:
    """Return predicted and measured values of trainings on 1, 2 and 4 instances."""
    lines = ["| recipe | instances | what | predicted | nine of ten | measured | error | inside |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for recipe in recipes:
        args = [recipe, *PLAIN, *TRAININGS[recipe]]
        with tempfile.TemporaryDirectory(prefix="podium-plan-") as folder:
            state = {"PODIUM_STATE": folder, "PODIUM_CACHE": f"{folder}/cache"}
            podium("plan", *args, "--instances", max(COUNTS), "--measure", "--seconds", 20, **state)
            for number in range(rounds):
                for count in COUNTS:
                    podium("plan", *args, "--instances", count, **state)
                    podium("train", *args, "--instances", count, "--out", f"{folder}/run-{count}-{number}", **state)
                    record = json.loads(Path(folder, "plans", "history.jsonl").read_text().splitlines()[-1])
                    lines += _graded(recipe, count, record["grades"])
    return lines


def _graded(recipe: str, count: int, grades: Mapping[str, tuple[tuple[float, float, float], float]]) -> list[str]:
    lines = []
    for what, ((value, low, high), measured) in grades.items():
        scale, digits = (1e9, ".3f") if what == "memory" else (1, ",.1f")
        cells = [f"{number / scale:{digits}}" for number in (value, low, high, measured)]
        lines.append(
            f"| {recipe} | {count} | {what.replace('memory', 'memory (GB)')} | {cells[0]} | {cells[1]} … "
            f"{cells[2]} | {cells[3]} | {100 * (value / measured - 1):+.0f} % | "
            f"{'yes' if low <= measured <= high else 'no'} |"
        )
        print(lines[-1], flush=True)
    return lines


def memory() -> list[str]:
    """Return estimates of memory against peaks."""
    lines = ["| workload | micro-batch | estimate (MB) | peak (MB) | estimate / peak |", "|---|---|---|---|---|"]
    for workload, (recipe, micros, more) in MEMORY.items():
        for micro in micros:
            args = [recipe, *PLAIN, f"batch.micro={micro}", "train.length=8up", *more]
            with tempfile.TemporaryDirectory(prefix="podium-plan-") as folder:
                podium("train", *args, "--out", f"{folder}/run")
                peak = json.loads(Path(folder, "run", "summary.json").read_text())["memory_peak_bytes"]
            estimated = int(subprocess.run(  # after the training, which has compiled the kernels
                [sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, check=True
            ).stdout)  # fmt: skip
            lines.append(
                f"| {workload} | {micro} | {estimated / 1e6:,.0f} | {peak / 1e6:,.0f} | {estimated / peak:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tables", "trainings", "memory"), help="replace this section of the results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    options = parser.parse_args(words)
    load = os.getloadavg()[0]
    parts: dict[str, tuple[str, Callable[[], list[str]]]] = {
        "tables": ("Published tables", tables),
        "memory": ("Memory", memory),
        **{
            f"trainings {recipe}": (f"Trainings of {recipe} here", partial(trainings, options.rounds, [recipe]))
            for recipe in options.recipes
        },
    }
    chosen = [name for name in parts if options.only is None or name.split()[0] == options.only]
    sections = _sections(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in chosen:
        title, measured = parts[name]
        sections[title] = "\n".join([f"{when_and_where(load)}.", "", *measured()])
        print(sections[title])
        text = "\n\n".join(
            ["# Plans", "Made by `python -m bench.plan`.", *(f"## {t}\n\n{b}" for t, b in sections.items())]
        )
        RESULTS.write_text(f"{text}\n", encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """Return the sections of earlier results by their titles."""
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title.strip(): body.strip() for title, _, body in parts}


if __name__ == "__main__":
    main()
