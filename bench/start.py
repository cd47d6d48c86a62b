"""How long a person waits: for `podium --help`, and for `podium train` until its first update and until its end.

    python -m bench.start [--against PYTHON] [--rounds 9]      three minutes; prints a table, writes results/start.md

Every command is a process of its own, from its start to its end, Python's own start included, and takes turns with the
others. `--against`: the Python of another environment that has Podium, whose times are shown beside; nothing is
written. On a machine that others use, compare the processor time (that of all threads), else the time that passes.
The first round compiles kernels and is not counted; a row shows how long that took.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "start.md"
RECIPE = ["mnist", "workload.data.source=generated", "workload.data.generated_train=4096", "train.length=32up",
          "workload.data.generated_test=512", "schedule.warmup=0", "engine.threads=1"]  # fmt: skip
UNTIL_FIRST, UNTIL_END = "until the first update", "until the end"

#: the command, with the times at which the first update was there; no more is changed
FIRST_UPDATE = """
import os, sys, time
from podium.cli import main
import importlib.abc, importlib.util

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "podium.engine.update":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            update = module.Engine.update
            def first(engine, *args, **kwargs):
                result = update(engine, *args, **kwargs)
                engine.collect()
                print("first", time.time(), time.process_time(), file=sys.__stderr__, flush=True)
                module.Engine.update = update
                return result
            module.Engine.update = first
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Watch())
sys.argv[0] = "podium"
main()
"""


def measured(command: list[str], folder: Path) -> dict[str, tuple[float, float]]:
    """Run a command to its end; return the seconds that passed and those of processors, by what they lead to."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    took, after = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    found = {UNTIL_END: (took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)}
    for line in done.stderr.splitlines():
        if line.startswith("first "):
            _, at, processor = line.split()
            found[UNTIL_FIRST] = (float(at) - began, float(processor))
    return found


def commands(python: str, out: str) -> dict[str, list[str]]:
    return {
        "podium --help": [python, "-m", "podium", "--help"],
        "podium train mnist": [python, "-c", FIRST_UPDATE, "train", *RECIPE, "--out", out],
        "import torch (nothing else)": [python, "-c", "import os, torch; os._exit(0)"],
    }


def main() -> None:
    """Measure all commands in turn, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    pythons = {"": sys.executable} | ({"other: ": options.against} if options.against else {})
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # people's Python keeps what it compiles
        os.environ["PODIUM_CACHE"], os.environ["PODIUM_STATE"] = str(folder / "cache"), str(folder / "state")
        for turn in range(options.rounds + 1):
            for number, (whose, python) in enumerate(pythons.items()):
                for what, command in commands(python, str(folder / f"{number}-{turn}")).items():
                    for until, took in measured(command, folder).items():
                        first = ", nothing compiled before" if turn == 0 else ""
                        if turn > 0 or until == UNTIL_FIRST:
                            times.setdefault(f"{whose}{what} {until}{first}", []).append(took)
            print(f"round {turn} of {options.rounds}", file=sys.stderr)
    lines = [
        "# Start",
        "",
        f"{when_and_where(load)}. Made by `python -m bench.start`: `podium train {' '.join(RECIPE)}`.",
        "",
        f"Seconds from the start of the process; median of {options.rounds} rounds (least … most).",
        "",
        "| command | passed | of processors |",
        "|---|---:|---:|",
    ]
    for what, found in times.items():
        passed, processors = zip(*found, strict=True)
        lines.append(f"| {what} | {_shown(passed)} | {_shown(processors)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if not options.against:
        RESULTS.write_text(text)


def _shown(values: tuple[float, ...]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} … {max(values):.2f})"


if __name__ == "__main__":
    main()
