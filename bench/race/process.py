"""Runs every heat in a process of its own, so that one contender's setup neither helps nor hinders another.

python -m bench.race.process '{"contender": …}'        as `run_heat` starts it
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.race.contenders import CONTENDERS
from bench.race.heat import Heat, Outcome


@dataclass(frozen=True)
class Result:
    """The result of a heat."""

    samples_per_second: float
    seconds: float
    threads: int
    #: of the initial weights and after the last update, where losses are compared
    first_loss: float = 0.0
    loss: float = 0.0
    #: from the start of the command to its end
    end_to_end_s: float = 0.0


def run_heat(heat: Heat) -> Result:
    """Run a heat in a fresh process, with a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="podium-race-") as folder:
        asked = json.dumps(asdict(heat) | {"folder": folder})
        env = os.environ | CONTENDERS[heat.contender].environment
        command = [sys.executable, "-m", "bench.race.process", asked]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(f"{heat.contender} failed on {heat.lane_name}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return Result(**json.loads(_result_file(folder).read_text()))


def main() -> None:
    heat = Heat(**json.loads(sys.argv[1]))
    outcome: Outcome = importlib.import_module(CONTENDERS[heat.contender].module).race(heat)
    end_to_end_s = outcome.end_to_end_s or time.time() - psutil.Process().create_time()
    num_samples = heat.num_updates * heat.recipe().batch.global_batch
    losses = (0.0, 0.0)
    if heat.compare:
        task = heat.task()
        losses = (task.loss(task.model), task.loss(outcome.model))
    result = Result(num_samples / outcome.seconds, outcome.seconds, outcome.threads, *losses, end_to_end_s)
    _result_file(heat.folder).write_text(json.dumps(asdict(result)))


def _result_file(folder: str) -> Path:
    return Path(folder) / "result.json"


if __name__ == "__main__":
    main()
