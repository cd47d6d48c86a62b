"""Updates on a fake CUDA device: tensors that have shapes, types and a device, and no numbers (`fake_cuda.cpp`).

Torch's fake tensors take the meta kernels, the decompositions and the rules of CUDA, which other devices do
not. Every update runs through Podium's engine, in a process of its own (`updates.py`), as there CUDA seems to exist.
Needs a C++ compiler; where there is none, tests that use it skip (`why_not`).
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.native import built, why_not

__all__ = ["library", "updates", "why_not"]
_HERE = Path(__file__).parent


@cache
def library() -> Path:
    """Build the library, unless this source has been built with this torch, and return its path."""
    return built(_HERE / "fake_cuda.cpp", ("torch_cpu", "c10"))


def updates(
    folder: Path, recipes: dict[str, list[str]], optimisers: list[str], spoilt: dict[str, list[str]]
) -> dict[str, dict]:
    """Make an update of each recipe with each of the optimisers; return by recipe/optimiser what happened: `error`, the
    `waits` of the host by place, the number of `operators` that ran on the device, whether weights of images are
    `channels_last`. `spoilt`: by recipe, what its loss is made to do beside that (`updates.SPOILT`), in further
    updates."""
    (folder / "updates.json").write_text(json.dumps({"recipes": recipes, "optimisers": optimisers, "spoilt": spoilt}))
    words = [sys.executable, "-m", "tests.support.fake_cuda.updates", str(library()), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=_HERE.parents[2], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, dict] = json.loads((folder / "answers.json").read_text())
    return answers
