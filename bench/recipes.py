"""The line at the head of every shipped recipe: what it makes on this machine.

    python -m bench.recipes                         all of them: an hour on an idle machine; writes the page
                                                    results/recipes.md
    python -m bench.recipes --write                 and the lines into the recipes
    python -m bench.recipes --only gpt2/medium --seconds 5      prints

Recipes that are made for a small machine run whole, by their own command. The others train a few updates of generated
samples, without accumulation, pipeline or half precision, and say with which micro-batch; how long one of their own
updates would take here is then extrapolated, and says so. So is the speed of a model that this machine's memory does
not hold: from the time of an update with two and with four of its layers.
"""

import argparse
import datetime
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.where import when_and_where
from podium.recipe.loading import Recipe, load_recipe
from podium.recipe.shipped import SHIPPED, shipped_recipes

RESULTS = Path(__file__).parent / "results" / "recipes.md"
#: run whole: recipe -> what it needs besides its name
WHOLE: dict[str, tuple[str, ...]] = {
    "bert/demo_tiny_128": ("parallel.stages=1",),
    "bert/quick": (),
    "cnn/quick": (),
    "cosmology/quick": (),
    "gpt2/char": (),
    "gpt2/quick": (),
    "neuron/full": (),
    "neuron/lstm": (),
    "neuron/quick": (),
}
#: a micro-batch that an update of some seconds holds; the first that fits the name
MICRO = {"cnn/resn*50*": 8, "cnn/mlperf*": 4, "cnn/efficientnet_b0": 8, "cnn/efficientnet_b4": 2, "bert/*_base_128*": 8,
         "bert/*_base_512*": 2, "bert/*_large_128*": 4, "bert/*_large_512*": 1, "cosmology/*": 2}  # fmt: skip
#: recipe -> overrides for a given number of layers, the fewer and the more that are measured, and its own number
BY_LAYERS = {"gpt2/xl": ("workload.model.size=custom workload.model.hidden=1600 workload.model.heads=25", 2, 4, 48)}
LEAST_RECORDS, _FIRST = 4, 2
_TOO_LONG_S = 600
_WIDTH = 120


@dataclass(frozen=True)
class Line:
    """What was measured of a recipe."""

    recipe: str
    overrides: tuple[str, ...]
    #: what the recipe's line says after the colon
    said: str

    def comment(self) -> str:
        """Return the lines for the recipe's head."""
        day, instructions = datetime.date.today(), torch.backends.cpu.get_cpu_capability()
        given = f", {' '.join(self.overrides)}" if self.overrides else ""
        text = f"Measured on {os.cpu_count()} cores ({instructions}) on {day}{given}: {self.said}"
        return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False))


def small_form(name: str, recipe: Recipe) -> tuple[str, ...]:
    """Return the overrides with which one process trains a few updates of the recipe."""
    span = getattr(getattr(recipe.workload.model, "norm", None), "span", 1)
    replicas = min(recipe.batch.num_replicas, span)
    found = ["workload.data.source=generated", f"batch.replicas={replicas}", "batch.accumulation=1"]
    if name.startswith("cosmology/"):  # they give the global batch
        found.append("batch.global=null")
    if "packed" in name:
        found.append("workload.data.packed=false")
    micro = next((micro for pattern, micro in MICRO.items() if fnmatch.fnmatch(name, pattern)), None)
    found += [] if micro is None else [f"batch.micro={micro}"]
    found += [] if recipe.parallel.stages == 1 else ["parallel.stages=1"]
    found += [] if recipe.precision.mode == "32.32" else ["precision.mode=32.32"]
    return tuple(found)


def rate_of(name: str, overrides: tuple[str, ...], seconds: float) -> float:
    """Train for about some seconds, end the training, and return the samples per second of its updates."""
    also = ("engine.updates_per_call=1", "valid.every=0", "checkpoint.every=0", "log.report=false")
    with tempfile.TemporaryDirectory(prefix="podium-recipes-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "podium", "train", name, *overrides, *also, "--out", str(run)]
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            try:
                records = _watched(process, run / "metrics.jsonl", seconds)
            finally:
                if process.poll() is None:  # nothing of it is wanted, least of all a checkpoint
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said.seek(0)
            assert len(records) > _FIRST, f"{name}: {said.read()[-2000:]}"
    (first, began), (last, ended) = records[_FIRST - 1], records[-1]
    batch = load_recipe(name, [*overrides, *also]).batch.global_batch
    return (last - first) * batch / (ended - began)


def _watched(process: subprocess.Popen, metrics: Path, seconds: float) -> list[tuple[int, float]]:
    """Return (update, seconds) of a running training's records: a few, and as many as come in time."""
    began = time.monotonic()
    while True:
        records = _records(metrics)
        waited = time.monotonic() - began
        enough = len(records) >= LEAST_RECORDS and records[-1][1] - records[_FIRST - 1][1] >= seconds
        if enough or process.poll() is not None or waited > max(_TOO_LONG_S, 10 * seconds):
            return records
        time.sleep(0.2)


def _records(metrics: Path) -> list[tuple[int, float]]:
    if not metrics.exists():
        return []
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    found = [json.loads(line) for line in whole]
    return [(record["update"], record["time/total_s"]) for record in found if "time/total_s" in record]


def few_updates(name: str, seconds: float) -> Line:
    """Measure a few updates, and say how long one of the recipe's own would take."""
    recipe = load_recipe(name, [])
    overrides = small_form(name, recipe)
    if name in BY_LAYERS:
        form, fewer, more, layers = BY_LAYERS[name]
        given = (*overrides, *form.split())
        took = [1 / rate_of(name, (*given, f"workload.model.layers={count}"), seconds) for count in (fewer, more)]
        rate = 1 / (took[0] + (took[1] - took[0]) * (layers - fewer) / (more - fewer))
        how = f" by extrapolation from {fewer} and {more} of {layers} layers, as memory does not hold the model,"
    else:
        rate, how = rate_of(name, overrides, seconds), ""
    own, tried = recipe.batch.global_batch, load_recipe(name, list(overrides)).batch.global_batch
    text = f"{_number(rate)} samples/s"
    if own != tried:
        text += f";{how} so one update of {own:,} samples would take {_duration(own / rate)}"
    return Line(name, overrides, f"{text}. The whole training has not been measured.")


def whole(name: str) -> Line:
    """Run a recipe by its own command, and say what its summary says."""
    overrides = WHOLE[name]
    with tempfile.TemporaryDirectory(prefix="podium-recipes-") as folder:
        run, began = Path(folder) / "run", time.perf_counter()
        command = [sys.executable, "-m", "podium", "train", name, *overrides, "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        took = time.perf_counter() - began
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        summary = json.loads((run / "summary.json").read_text())
    metrics = {key.removeprefix("valid/"): value for key, value in summary["valid"]["last"].items()}
    shown = ", ".join(f"{key} {value:.4g}" for key, value in sorted(metrics.items()) if isinstance(value, float))
    rate = _number(summary["samples_per_second"])
    return Line(name, overrides, f"{_duration(took)} from start to end, {rate} samples/s; in validation {shown}.")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s"


_GOES_ON = r"(?:[^\n]|\n# )*?"
#: what a line of this script replaces: its own, those of the same kind written before it, and that there was none
_OLD = (
    re.compile(rf"# Measured on \d+ cores \(\w+\) on \d{{4}}-\d\d-\d\d{_GOES_ON}\.\n(?!#)"),
    re.compile(rf"# Measured on{_GOES_ON}samples/s\. The{_GOES_ON}measured(?: here)?\.\n"),
)


def with_line(text: str, line: Line) -> str:
    """Return a recipe's text with the line at the end of its head, instead of an earlier one."""
    head = "".join(re.findall(r"^#.*\n", text.split("\n\n")[0] + "\n", flags=re.MULTILINE))
    head = text[: len(head)] if text.startswith(head) else head
    new = head
    for old in _OLD:
        new = old.sub("", new)
    new = new.replace(" Not measured.\n", "\n")
    return new + line.comment() + text[len(head) :]


def _path(name: str) -> Path:
    found = SHIPPED / f"{name}.yaml"
    return found if found.exists() else SHIPPED / name / "default.yaml"


def main() -> None:
    """Measure the recipes, print their lines, and write what was asked for."""
    names = [name for name, _ in shipped_recipes()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="RECIPE")
    parser.add_argument("--seconds", type=float, default=20.0, help="of updates, at least, unless a recipe runs whole")
    parser.add_argument("--write", action="store_true", help="put the lines into the recipes")
    options = parser.parse_args()
    opening = f"{when_and_where(os.getloadavg()[0])}. Made by `python -m bench.recipes`."
    lines, failed = [], []
    for name in options.only:
        try:
            lines.append(whole(name) if name in WHOLE else few_updates(name, options.seconds))
        except AssertionError as error:
            failed.append(name)
            print(error, file=sys.stderr)
            continue
        print(f"{name}: {lines[-1].said}", flush=True)
        if options.write:
            path = _path(name)
            path.write_text(with_line(path.read_text(encoding="utf-8"), lines[-1]), encoding="utf-8")
    if options.only == names:
        rows = [f"| {line.recipe} | {' '.join(line.overrides)} | {line.said} |" for line in lines]
        table = ["# Recipes", "", opening, "", "| recipe | with | measured |", "|---|---|---|", *rows]
        RESULTS.write_text("\n".join(table) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
