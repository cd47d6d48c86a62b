"""Estimates the memory of an instance in a process of its own, which has compiled nothing and holds nothing else."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from podium.errors import PodiumError, UserError
from podium.launch.lifeline import LAUNCHER, end_with_launcher
from podium.recipe.loading import Recipe, load_recipe, to_yaml
from podium.training.build import build_training
from podium.training.memory import estimate

#: started with a recipe and KEY=VALUE; prints bytes, or nothing where there is no estimate. A training's process has
#: loaded the command line, too
PROGRAM = "import podium.cli, podium.plan.memory; podium.plan.memory.main()"


def estimated_bytes(recipe: Recipe) -> int | None:
    """Return the most memory that the only instance of a training needs; None where that cannot be told."""
    with tempfile.TemporaryDirectory(prefix="podium-plan-") as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(to_yaml(recipe.tree()), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(file)],
            env={**os.environ, LAUNCHER: str(os.getpid())}, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise UserError(f"the memory of a training could not be estimated: {last[:300]}")
    return int(done.stdout) if done.stdout.strip() else None


def main() -> None:
    end_with_launcher(os.environ)
    try:
        found = estimate(build_training(load_recipe(sys.argv[1], sys.argv[2:])))
    except PodiumError as error:
        sys.exit(str(error))
    if found is not None:
        print(found.total)
