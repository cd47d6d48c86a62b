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

from bench.race.contenders import COMPILED, CONTENDERS, PLAIN
from bench.race.heat import Heat, Outcome

#: each contender compiles a lane once: what it compiled is kept from heat to heat and from race to race
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": str(COMPILED / "inductor"),
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


class HeatError(Exception):
    """A contender could not run a heat."""


@dataclass(frozen=True)
class Result:
    """The result of a heat."""

    samples_per_second: float
    seconds: float
    threads: int
    #: where losses are compared: of the initial weights (by the plain loop only), and after the last update
    first_loss: float = 0.0
    loss: float = 0.0
    #: from the start of the command to its end
    end_to_end_s: float = 0.0


def run_heat(heat: Heat) -> Result:
    """Run a heat in a fresh process, with a folder that is removed afterwards; raise HeatError if it fails."""
    with tempfile.TemporaryDirectory(prefix="podium-race-") as folder:
        asked = json.dumps(asdict(heat) | {"folder": folder})
        env = os.environ | _CACHES | CONTENDERS[heat.contender].environment
        command = [sys.executable, "-m", "bench.race.process", asked]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise HeatError(f"{heat.contender} failed on {heat.lane_name}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return Result(**json.loads(_result_file(folder).read_text()))


def main() -> None:
    heat = Heat(**json.loads(sys.argv[1]))
    outcome: Outcome = importlib.import_module(CONTENDERS[heat.contender].module).race(heat)
    end_to_end_s = outcome.end_to_end_s or time.time() - psutil.Process().create_time()
    num_samples = heat.num_updates * heat.recipe().batch.global_batch
    first_loss = loss = 0.0
    if heat.compare:
        task = heat.task()
        first_loss = task.loss(task.model) if heat.contender == PLAIN else 0.0
        assert outcome.model is not None
        loss = task.loss(outcome.model)
    result = Result(num_samples / outcome.seconds, outcome.seconds, outcome.threads, first_loss, loss, end_to_end_s)
    _result_file(heat.folder).write_text(json.dumps(asdict(result)))


def _result_file(folder: str) -> Path:
    return Path(folder) / "result.json"


if __name__ == "__main__":
    main()
